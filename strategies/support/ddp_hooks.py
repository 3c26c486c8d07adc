"""Lightning's private place for DDP's communication hook, and what to say when it is not used."""

import lightning


def hook_was_not_asked_for(consequence: str, instead: str) -> str:
    """An error's text: Lightning has wrapped the model without calling ``_register_ddp_hooks``, which we override.

    Args:
        consequence: what would happen without the hook.
        instead: what works all the same.
    """
    return (
        f"lightning {lightning.__version__} has wrapped the model without calling DDPStrategy._register_ddp_hooks, so "
        f"DDP has no communication hook of retime's and {consequence}: install a version of lightning that this "
        f"version of retime was tested with (2.6), or {instead}"
    )
