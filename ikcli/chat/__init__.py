"""Chats: templates to prompts, generated text back to content, reasoning and tool calls."""

from ikcli.chat.template import ChatTemplate

__all__ = ["ChatTemplate"]
