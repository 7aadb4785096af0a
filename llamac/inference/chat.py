"""`llamac chat DIR` is `llamac generate DIR --chat`."""

from llamac.inference import generate


def main() -> None:
    generate.main(is_chat=True)
