"""`make gpu`: what only a GPU can show, in parts; `__main__.py` runs them, and bench/README.md describes them."""
