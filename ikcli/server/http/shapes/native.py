"""/completion and /infill: llama-server's native form, with the fields of both forks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ikcli.server.http import sse
from ikcli.server.http.errors import ApiError
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.jsontext import quote
from ikcli.server.http.shapes.common import Naming, Probabilities, n_prompt, progress_json, timings_json
from ikcli.server.slots.messages import Delta, Final, PromptProgress


class NativeShape:
    """Native shape.

    `prompts` are the texts shown in answers and `settings` their `generation_settings`, one per generation.
    """

    def __init__(
        self,
        names: Naming,
        fields: GenerationBody,
        probabilities: Probabilities | None,
        prompts: Sequence[str],
        settings: Sequence[dict[str, Any]],
        first_slot: int = 0,
    ) -> None:
        self._names = names
        self._fields = fields
        self._probabilities = probabilities
        self._prompts = prompts
        self._settings = settings
        self._first = first_slot
        self._plain = probabilities is None and not fields.timings_per_token

    def begin(self) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def progress(self, index: int, event: PromptProgress) -> bytes:
        out = {"index": index, "content": "", "tokens": [], "stop": False, "id_slot": -1, "tokens_predicted": 0}
        return sse.data({**out, "tokens_evaluated": event.total, "prompt_progress": progress_json(event)})

    def delta(self, index: int, event: Delta) -> bytes:
        if self._plain:  # shortcut for the common case, with the same text as below
            ids = ",".join([str(token.id) for token in event.tokens])
            text = (
                f'data: {{"index":{index},"content":{quote(event.text)},"tokens":[{ids}],"stop":false,'
                f'"id_slot":{event.id_slot + self._first},"tokens_predicted":{event.timings.predicted_n},'
                f'"tokens_evaluated":{n_prompt(event.timings)},"multimodal":false}}\n\n'
            )
            return text.encode("utf-8", "replace")
        out: dict[str, Any] = {
            "index": index,
            "content": event.text,
            "tokens": [token.id for token in event.tokens],
            "stop": False,
            "id_slot": event.id_slot + self._first,
            "tokens_predicted": event.timings.predicted_n,
            "tokens_evaluated": n_prompt(event.timings),
            "multimodal": False,
        }
        if self._fields.timings_per_token:
            out["timings"] = timings_json(event.timings)
        if self._probabilities is not None:
            out["completion_probabilities"] = self._probabilities.native(event.tokens)
        return sse.data(out)

    def final(self, index: int, event: Final) -> bytes:
        rest = self.delta(index, event.tail) if event.tail.text or event.tail.tokens else b""
        return rest + sse.data(self._selected(self._final(index, event, content="", tokens=[])))

    def failure(self, error: ApiError) -> bytes:
        return sse.data(error.body())

    def whole(self, finals: Sequence[Final]) -> Any:
        out = []
        for index, event in enumerate(finals):
            tokens = [token.id for token in event.tokens] if self._fields.return_tokens else []
            out.append(self._selected(self._final(index, event, content=event.text, tokens=tokens)))
        return out[0] if len(out) == 1 else out

    def _final(self, index: int, event: Final, *, content: str, tokens: list[int]) -> dict[str, Any]:
        probabilities = {}
        if self._probabilities is not None:  # those of all tokens, also at the end of a stream
            probabilities = {"completion_probabilities": self._probabilities.native(event.tokens)}
        return probabilities | {
            "index": index,
            "content": content,
            "tokens": tokens,
            "generated_text": event.text,
            "id_slot": event.id_slot + self._first,
            "stop": True,
            "model": self._names.alias,
            "tokens_predicted": event.timings.predicted_n,
            "tokens_evaluated": n_prompt(event.timings),
            "generation_settings": self._settings[index],
            "prompt": self._prompts[index],
            "has_new_line": event.has_new_line,
            "truncated": event.truncated,
            "stop_type": event.stop_type,
            "stopped_eos": event.stop_type == "eos",
            "stopped_word": event.stop_type == "word",
            "stopped_limit": event.stop_type == "limit",
            "stopping_word": event.stopping_word,
            "tokens_cached": event.timings.n_past,
            "timings": timings_json(event.timings),
        }

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return only the fields of `response_fields`, under their paths; missing ones are left out."""
        if not self._fields.response_fields:
            return answer
        out = {}
        for path in self._fields.response_fields:
            value: Any = answer
            for key in path.split("/"):
                if not isinstance(value, dict) or key not in value:
                    break
                value = value[key]
            else:
                out[path] = value
        return out
