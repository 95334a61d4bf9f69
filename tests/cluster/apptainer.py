"""Plays apptainer in the manner of the real one.

A container has the folders of the image, here the machine's programs, and what is bound. The host's environment is of
no use inside.
"""

import sys

PROGRAM = f"""
[[ -n ${{root:-}} ]] || root=$(mktemp -d) exec unshare --mount "$0" "$@"
PATH={sys.prefix}/bin:/usr/bin:/bin:/usr/sbin
mount -t tmpfs none "$root"
enter() {{ mkdir -p "$root$2" && mount --rbind "$1" "$root$2"; }}
for folder in /usr /bin /lib /lib64 /etc /proc /sys /dev {sys.prefix} {sys.base_prefix}; do
  [[ ! -d $folder ]] || enter "$folder" "$folder"
done
mkdir -p "$root/tmp"
for pair in ${{3//,/ }}; do enter "${{pair%%:*}}" "${{pair#*:}}"; done
[[ -e $root/run/slurm.conf ]] || echo "other folders are absent" >&2
exec chroot "$root" bash -c 'cd "$0"
  [[ ! -f .venv/bin/activate ]] || mount --bind /dev/null .venv/bin/activate
  exec "$@"' "$5" "${{@:7}}"
"""
