"""Every private name of torch that retime uses: one accessor each, and no other file may use one.

Import the file that is about it: ``from retime.foundations.torch_private.engine import graph_task_id``. A name that
is gone raises :class:`~retime.foundations.torch_private.missing.PrivateNameError` with the feature that needs it, most
of them at import; the tests of this package check that each still does what it is used for.
"""
