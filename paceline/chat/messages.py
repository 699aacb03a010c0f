"""Messages of a chat in the shape of the OpenAI API; `paceline/data/messages.py` converts them for chat templates.
Promise: no field of a message is dropped silently. Forms that no template can take are refused by name here; fields
that the template itself would leave out are refused by `paceline/chat/rendering.py`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from paceline.data.messages import Json, read_message
from paceline.errors import DataError, InvalidInput

__all__ = ["MAX_MESSAGES", "Json", "Message", "Unsupported"]

MAX_MESSAGES = 10_000


class Unsupported(InvalidInput):
    """Raised for a field of the API, or for a value of a field, that is not supported."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class Message(BaseModel):
    """One message of a chat. The template decides about further fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Json] | None = None
    tool_calls: list[Json] | None = None

    def rendered(self) -> Json:
        """Return the message as templates take messages. Raises Unsupported if no template could render the message."""
        try:
            return read_message({name: getattr(self, name) for name in self.model_fields_set})
        except DataError as fault:
            raise Unsupported(f"messages has a message {fault}", "messages") from None
