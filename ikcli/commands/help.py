"""`ik help`: topics and commands, or a page of the manual."""

from __future__ import annotations

import sys

from ikcli.cli.help import main_help
from ikcli.cli.table import BY_NAME
from ikcli.errors import IkError, UsageError
from ikcli.log import log
from ikcli.manual import pages, title
from ikcli.settings.tools import HelpConfig
from ikcli.suggest import nearest


def run(config: HelpConfig) -> int:
    """Print the page of a topic, rendered on a terminal, otherwise as its source."""
    topics = pages()
    if not config.args:
        print(main_help())
        width = max((len(topic) for topic in topics), default=0)
        print("\nTopics (ik help TOPIC):", *(f"  {t:<{width}}  {title(page)}" for t, page in topics.items()), sep="\n")
        return 0
    topic = config.args[0].lower().removesuffix(".md")
    if topic not in topics:
        if not topics:
            raise IkError("the pages of the manual are not part of this installation; they are in docs/ of the sources")
        near = nearest(topic, [*topics, *BY_NAME])
        hint = f"; did you mean {near}?" if near else ""
        raise UsageError(f"no topic {topic}{hint}; topics are {', '.join(topics)}")
    text = topics[topic].read_text(encoding="utf-8")
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        sys.stdout.write(text)
    if topic in BY_NAME:
        log(f"options: ik {topic} --help")
    return 0
