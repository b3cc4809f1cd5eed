"""minigpt and its peers on the same work; `python -m bench --help`, from the root of the repository."""
