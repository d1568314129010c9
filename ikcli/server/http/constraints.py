"""Grammars and schemas of a request as engine constraints, compiled once per request outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ikcli.errors import IkError
from ikcli.grammar.spec import GrammarKind, GrammarSpec
from ikcli.server.http.errors import bad_request
from ikcli.server.http.generation_body import GenerationBody
from ikcli.server.http.state import ServerState
from ikcli.server.slots.messages import Constraint

ConstraintMaker = Callable[[], Constraint]


def spec_of(fields: GenerationBody) -> GrammarSpec | None:
    """Return the constraint that `grammar` or `json_schema` of a request asks for, or None."""
    if fields.grammar:
        return GrammarSpec(GrammarKind.GBNF, source=fields.grammar)
    if fields.json_schema is not None:
        return GrammarSpec(GrammarKind.JSON_SCHEMA, schema=fields.json_schema)
    return None


async def constraint_of(state: ServerState, fields: GenerationBody) -> ConstraintMaker | None:
    """Return the constraint of a request without a chat. Raise ApiError 400 if its grammar or schema is invalid."""
    spec = spec_of(fields)
    return None if spec is None else await compiled(state, spec)


async def compiled(state: ServerState, spec: GrammarSpec) -> ConstraintMaker:
    """Compile a grammar or schema. Raise ApiError 400 if it is invalid."""
    try:
        return await asyncio.to_thread(state.grammar.compile, spec)
    except IkError as e:
        name = {GrammarKind.GBNF: "grammar", GrammarKind.JSON_SCHEMA: "json_schema"}.get(spec.kind, "tools")
        text = str(e)
        raise bad_request(text if text.startswith((name, "json_schema")) else f"{name}: {text}") from None
