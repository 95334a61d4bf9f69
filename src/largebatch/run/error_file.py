"""The file in which a failed process of a cluster job leaves what went wrong: errors/rank_<rank>.json in its logs.

    {"rank": …, "node": …, "process": …, "time": …, "type": …, "message": …, "consequence": true | false}

`largebatch.tools.job.cause` finds the first cause of a failed start in these files.
"""

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

from largebatch.storage.files import replace_json_file

# What torch, gloo and NCCL say to the processes that are left when another one went away.
PEER_WENT_AWAY = re.compile(
    "closed by peer|reset by peer|broken pipe|connection refused|connection was likely closed|socket timeout"
    "|remote process exited|ncclRemoteError|ncclSystemError|communicator was aborted|collective operation timeout"
    "|recv, got 0 bytes|timed out waiting .*(recv|send) operation|connectFullMesh failed|pair closure",
    re.IGNORECASE,
)


def node_name() -> str:
    """This node, as the cluster calls it."""
    return os.environ.get("LARGEBATCH_NODE") or socket.gethostname()


def is_consequence(error: BaseException) -> bool:
    """Whether a collective failed because another process went away, so that the cause is to be found there.

    A reader's own connection that breaks raises an OSError, and is a cause.
    """
    return isinstance(error, RuntimeError) and PEER_WENT_AWAY.search(str(error)) is not None


def keep_error(kind: str, message: str, consequence: bool = False) -> None:
    """Leave the failure of this process in the job's logs, if there are any."""
    logs = os.environ.get("LARGEBATCH_LOGS")
    if not logs:
        return
    rank = int(os.environ.get("RANK", 0))
    # The file must not hide the error.
    with suppress(OSError):
        folder = Path(logs) / "errors"
        folder.mkdir(parents=True, exist_ok=True)
        value = {
            "rank": rank,
            "node": node_name(),
            "process": os.getpid(),
            "time": time.time(),
            "type": kind,
            "message": message,
            "consequence": consequence,
        }
        replace_json_file(folder / f"rank_{rank}.json", value)
