"""Request bodies of the generating routes: `GenerationBody` plus the fields of each route."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BeforeValidator, Strict

from ikcli.server.http.errors import bad_request
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.schema import Flag, Text, field, required, shown_as, whole
from ikcli.settings.sampling import INT32

# fmt: off

MAX_PROBS = 1000
_Prompt = Annotated[Any, shown_as(anyOf=[{"type": "string"}, {"type": "array", "items": {}}, {"type": "object"}])]
_Object = Annotated[Any, shown_as(type="object")]
_Objects = Annotated[Any, shown_as(type="array", items={"type": "object"})]
_Messages = Annotated[Any, shown_as(type="array", items={
    "type": "object", "properties": {"role": {"type": "string"}, "content": {}}, "required": ["role"]})]


def _counted(value: Any) -> Any:
    """Read a count in which `true` means one."""
    return int(value) if isinstance(value, bool) else whole(value)


def _asked(value: Any) -> Any:
    """Read an optional count in which `false` means none and `true` means one."""
    return None if value is False else _counted(value)


class CompletionBody(GenerationBody, frozen=True):
    """Fields that /completion and /infill share."""

    logprobs: Annotated[
        Annotated[int, Strict(), Ge(0)] | None, BeforeValidator(_counted),
        shown_as(type=["boolean", "integer"], minimum=0),
    ] = field(None, "the same as n_probs")

    @property
    def implied_probs(self) -> int | None:
        """The `n_probs` that another field implies, see `GenerationBody`."""
        return self.logprobs


class NativeBody(CompletionBody, frozen=True):
    """Request body of /completion."""

    prompt: _Prompt = required("text, token ids, both mixed, {prompt_string}, or an array of these")


class InfillBody(CompletionBody, frozen=True):
    """Request body of /infill."""

    input_prefix: Text = required("text before the cursor")
    input_suffix: Text = required("text behind the cursor")
    input_extra: Annotated[Any, shown_as(type="array")] = field(None, "other files: [{filename, text}]")
    prompt: Text = field("", "text that the answer goes on with")


class OpenAICompletionBody(GenerationBody, frozen=True):
    """Request body of /v1/completions."""

    prompt: _Prompt = required("text, token ids, both mixed, {prompt_string}, or an array of these")
    suffix: Text = field("", "text behind the answer")
    echo: Flag = field(False, "the answer begins with the prompt")
    best_of: Annotated[int, Strict(), Ge(1), Le(64), BeforeValidator(whole)] | None = field(None,
        "answers made, of which the n most likely are returned")
    logprobs: Annotated[
        Annotated[int, Strict(), Ge(0), Le(MAX_PROBS)] | None, BeforeValidator(_asked),
        shown_as(type=["boolean", "integer"], minimum=0, maximum=MAX_PROBS),
    ] = field(None, "return the probabilities of this many tokens at every position")

    @property
    def implied_probs(self) -> int | None:
        """The `n_probs` that another field implies, see `GenerationBody`; it includes the chosen token."""
        return None if self.logprobs is None else max(self.logprobs, 1)


class ChatBody(GenerationBody, frozen=True):
    """Request body of /v1/chat/completions; ikcli.chat reads the conversation fields itself."""

    messages: _Messages = required("the conversation")
    tools: _Objects = field(None, "functions that the model may call")
    tool_choice: Annotated[Any, shown_as()] = field(None, "auto, none, required, or a function")
    parallel_tool_calls: Flag = field(False, "the answer may call several functions")
    response_format: Annotated[Any, shown_as()] = field(None, "text, json_object (with schema) or json_schema")
    chat_template_kwargs: _Object = field(None, "variables for the chat template")
    reasoning_format: Text = field("", "where the answer has the thoughts")
    reasoning_effort: Text = field("", "how much the model thinks, if its template knows that")
    reasoning_budget_tokens: Annotated[int, Strict(), Ge(-1), Le(INT32), BeforeValidator(whole)] | None = field(None,
        "most tokens of thinking; -1 = no limit",
        names="reasoning_budget_tokens thinking_budget_tokens reasoning_budget")
    reasoning_budget_message: Text | None = field(None, "what the thoughts end with when the budget is used up")
    reasoning_control: Flag = field(False, "thinking may be ended: .../control")
    add_generation_prompt: Flag = field(True, "the prompt ends with the beginning of an answer")
    logprobs: Flag = field(False, "return the log-probabilities of the tokens")
    top_logprobs: Annotated[int, Strict(), Ge(0), Le(MAX_PROBS), BeforeValidator(whole)] | None = field(None,
        "return those of this many other tokens at every position")

    @property
    def n_top(self) -> int | None:
        """Number of tokens that `top_logprobs` asks for besides the chosen one; None without `logprobs`."""
        if self.logprobs:
            return 20 if self.top_logprobs is None else self.top_logprobs
        if self.top_logprobs:
            raise bad_request("top_logprobs requires logprobs to be set to true")
        return None

    @property
    def implied_probs(self) -> int | None:
        """The `n_probs` that another field implies, see `GenerationBody`."""
        return None if self.n_top is None else max(self.n_top, 1)


class AnthropicBody(GenerationBody, frozen=True):
    """Request body of /v1/messages as documented; `dialects/anthropic.py` turns it into a `ChatBody`."""

    messages: _Messages = required("the conversation")
    system: Annotated[Any, shown_as()] = field(None, "text or text blocks")
    stop_sequences: Annotated[Any, shown_as(type="array", items={"type": "string"})] = field(None, "as stop")
    tools: _Objects = field(None, "functions that the model may call")
    tool_choice: _Object = field(None, "which of them it calls")
    thinking: _Object = field(None, "whether the model thinks, and how much")


class ResponsesBody(GenerationBody, frozen=True):
    """Request body of /v1/responses as documented; `dialects/responses.py` turns it into a `ChatBody`."""

    input: Annotated[Any, shown_as()] = required("text or an array of messages and items")
    instructions: Text = field("", "the system message")
    max_output_tokens: Annotated[Any, shown_as(type="integer")] = field(None, "as n_predict")
    tools: _Objects = field(None, "functions that the model may call")
    text: _Object = field(None, "the form of the answer")
    reasoning: _Object = field(None, "how much the model thinks")
