"""A project of your own around a model of your own: proof, pre-flight, plan and launch files.

    new_project("my-model", chip="h100", chips=8)      the folder my-model, ready to be worked in

The files are those of `template/`, with the project's name in them.
"""

from fmlab.project.create import Target, new_project

__all__ = ["Target", "new_project"]
