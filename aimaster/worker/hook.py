"""Zero-code hook (placeholder body until the hook lands in this file)."""


def autoload() -> None:
    """Entry point of the group ``torch.backends``; must never raise."""
