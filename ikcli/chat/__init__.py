"""Render chats to prompts, and parse generated text back to content, reasoning and tool calls.

`ChatFormat.for_model(template)` renders a `ChatRequest` (`parse_request(body)`) to a `ChatPrompt`: text, constraint and
a `ChatParser` that reads the answer as it is generated.
"""

from ikcli.chat.content import RequestError
from ikcli.chat.formats import ChatFormat
from ikcli.chat.messages import Message, Tool, ToolCall, parse_messages, parse_tools
from ikcli.chat.parser import ChatDelta, ChatMessage, ChatParser, ParserSettings
from ikcli.chat.prompt import ChatPrompt
from ikcli.chat.request import ChatDefaults, ChatRequest, parse_request
from ikcli.chat.template import ChatTemplate

__all__ = [
    "ChatDefaults",
    "ChatDelta",
    "ChatFormat",
    "ChatMessage",
    "ChatParser",
    "ChatPrompt",
    "ChatRequest",
    "ChatTemplate",
    "Message",
    "ParserSettings",
    "RequestError",
    "Tool",
    "ToolCall",
    "parse_messages",
    "parse_request",
    "parse_tools",
]
