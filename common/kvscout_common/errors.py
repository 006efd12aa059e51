"""The one exception tree of kvscout.

::

    KvscoutError
    ├── InvalidArgument      a field of the request is wrong; names the field
    │   └── ConfigError      a flag, environment variable or file entry is wrong; names the key
    ├── NotFound             unknown model, worker or request
    ├── AlreadyExists        the id is taken by another request
    ├── FailedPrecondition   well-formed, but the state forbids it (block-size mismatch)
    ├── ResourceExhausted    a limit is reached: busy workers, full queue, message size
    ├── Unavailable          known, but not able to serve now; a later try may succeed
    │   └── Draining         the service shuts down: ask another one of its kind
    ├── DeadlineExceeded     the deadline passed before the answer was ready
    ├── Cancelled            the caller went away
    ├── Unauthenticated      no valid token
    ├── PermissionDenied     a valid token whose role or tenant does not allow the call
    ├── Unimplemented        this release does not have the call
    └── InternalError        a defect of ours

What each is on the wire says the one table of `statuses`.
"""

from __future__ import annotations

MAX_TEXT = 1_000
"""Characters of an error's text: it may repeat what a caller sent, and a status travels in headers of a few KiB."""


class KvscoutError(Exception):
    """Root of every error that kvscout raises on purpose.

    Args:
        message: What happened, in one sentence a caller can act on.
        field: The request field, flag or key at fault, if there is one.
        retry_after_seconds: When a later try may succeed, if that is known.
        cause: Why, in one word, where the class does not say it ("queue"); "" = it does.

    Attributes:
        answered: On a client: the service itself said so, as opposed to a connection that failed.
    """

    answered: bool = False
    discreet: str = ""
    """Text for callers without the role admin, since the message names addresses; "" = the message."""

    cause: str = ""

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_seconds: float | None = None, cause: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_seconds = retry_after_seconds
        if cause:
            self.cause = cause

    def for_clients(self) -> KvscoutError:
        """Return the same error without addresses of this installation."""
        if not self.discreet:
            return self
        error = type(self)(self.discreet, field=self.field, retry_after_seconds=self.retry_after_seconds)
        error.cause = self.cause
        error.__cause__ = self.__cause__
        return error

    def __str__(self) -> str:
        text = f"{self.field}: {self.message}" if self.field else self.message
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


class InvalidArgument(KvscoutError):
    """A field of the request is wrong, whatever the state of the system."""


class ConfigError(InvalidArgument):
    """A flag, environment variable or file entry is wrong."""


class NotFound(KvscoutError):
    """The model, worker or request is unknown."""


class AlreadyExists(KvscoutError):
    """The id is already taken."""


class FailedPrecondition(KvscoutError):
    """The request is well-formed, but the state of the system forbids it."""


class ResourceExhausted(KvscoutError):
    """A limit is reached."""


class Unavailable(KvscoutError):
    """Nothing can serve the request now; a later try may succeed."""


class Draining(Unavailable):
    """The service shuts down and takes nothing new; another one of its kind may."""


class DeadlineExceeded(KvscoutError):
    """The deadline passed before the answer was ready."""


class Cancelled(KvscoutError):
    """The caller went away."""


class Unauthenticated(KvscoutError):
    """The call carries no valid token."""


class PermissionDenied(KvscoutError):
    """The token is valid, its role or tenant does not allow the call."""


class Unimplemented(KvscoutError):
    """This release does not have the call."""


class InternalError(KvscoutError):
    """A defect of ours."""
