"""Messages of a chat in the shape of the OpenAI API. `paceline/data/messages.py` reads them into the shape that chat templates take.

Promise: nothing of a message is dropped on the way. A form that no template can take is refused by name; what the template
itself would leave out is refused by `paceline/chat/rendering.py`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from paceline.data.messages import Json, read_message
from paceline.errors import DataError, InvalidInput

__all__ = ["MAX_MESSAGES", "Json", "Message", "Unsupported"]

MAX_MESSAGES = 10_000


class Unsupported(InvalidInput):
    """A field of the API that is not supported here, or not with this value."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class Message(BaseModel):
    """One message of a chat. The template decides on further fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Json] | None = None
    tool_calls: list[Json] | None = None

    def rendered(self) -> Json:
        """Return the message as templates take it. Raises Unsupported for what no template could render."""
        try:
            return read_message({name: getattr(self, name) for name in self.model_fields_set})
        except DataError as fault:
            raise Unsupported(f"messages has one {fault}", "messages") from None
