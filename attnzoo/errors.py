"""Every error a user can cause, so that one `except AttnzooError` catches them all."""


class AttnzooError(Exception):
    """The base of every error this package raises on purpose."""


class OptionError(AttnzooError, ValueError):
    """An option is unknown, missing, of the wrong type, or impossible."""


class InputError(AttnzooError, ValueError):
    """A tensor handed to an attention has the wrong shape or dtype, masks aside."""


class MaskError(InputError):
    """A mask has a dtype or a shape that has no meaning for its argument."""


class CacheError(AttnzooError, ValueError):
    """A cache is full, too short, or made for something else."""


class NameTakenError(AttnzooError, ValueError):
    """Two different variants ask for one name."""


class UnknownVariantError(AttnzooError, ValueError):
    """No variant has this name, or the one that has it can't be imported."""


class RecipeError(AttnzooError, ValueError):
    """A recipe can't be read, or asks for something that does not exist."""


class NotSupportedError(AttnzooError):
    """A call asks a variant for what it declares to do without."""


class TrainingError(AttnzooError):
    """A training that was rightly asked for can't go on: it diverged, the disk is full, a process died."""
