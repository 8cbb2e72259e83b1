"""The one error that users cause and can mend."""


class InputError(ValueError):
    """Bad input: the message is one sentence that says what, where and how to mend it."""


class ExactnessError(RuntimeError):
    """A transcript on which the packed forward and the plain model disagree; it must be set aside."""
