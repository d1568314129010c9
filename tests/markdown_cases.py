"""Markdown and the HTML that the web page makes of it, and the script that renders and abbreviates it."""

from __future__ import annotations

MARKDOWN = (
    ("a *b* **c** ~~e~~ `f*g`", "<p>a <em>b</em> <strong>c</strong> <del>e</del> <code>f*g</code></p>"),
    ("***d***", "<p><em><strong>d</strong></em></p>"),
    ("**a *b* c** *a **b***", "<p><strong>a <em>b</em> c</strong> <em>a <strong>b</strong></em></p>"),
    ("2 * 3 * 4, snake_case_name, a * b, **open", "<p>2 * 3 * 4, snake_case_name, a * b, **open</p>"),
    ("\\*no\\* `` a ` b `` &lt;b&gt; &amp;lt;", "<p>*no* <code>a ` b</code> &lt;b&gt; &amp;lt;</p>"),
    ("a\nb  \nc\\\nd", "<p>a<br>b<br>c<br>d</p>"),
    ("a<BR />b <brx> <!-- c -->", "<p>a<br>b &lt;brx&gt; &lt;!-- c --&gt;</p>"),
    ("**「a」**は*「b」*は", "<p><strong>「a」</strong>は<em>「b」</em>は</p>"),
    ("# A #\n## B\nText\n===", '<h3 class="h1">A</h3><h4 class="h2">B</h4><h3 class="h1">Text</h3>'),
    ("- a\n- b\n  - c\n1. d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol><li>d</li></ol>"),
    ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
    ("1. a\n  - b\n  - c\n2. d", "<ol><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>"),
    ("1. a\n  ```py\n  b\n      c\n  ```\n10. d\n  - e\n    - f",
     "<ol><li>aC{py|b\n    c}</li><li>d<ul><li>e<ul><li>f</li></ul></li></ul></li></ol>"),
    ("```\n1. a\n  - b\n```", "C{code|1. a\n  - b}"),
    ("- [ ] a\n- [X] `b`", "<ul>BOXa</li>DONE<code>b</code></li></ul>"),
    ("> a\nb\n> > c", "<blockquote><p>a<br>b</p><blockquote><p>c</p></blockquote></blockquote>"),
    ("a\n\n---\n***", "<p>a</p><hr><hr>"),
    ("a|b\n-|:-:\n1|`x\\|y`\n2", "TABLE<thead><tr><th>a</th>TH b</th></tr></thead><tbody><tr><td>1</td>"
     "TD <code>x|y</code></td></tr><tr><td>2</td>TD </td></tr></tbody></table></div>"),
    ("a | b, no table", "<p>a | b, no table</p>"),
    ("[a b](https://e.org/x_(y) \"t\") [c](x) [d]", "<p>L{a b|https://e.org/x_(y)} [c](x) [d]</p>"),
    ("(https://e.org/a_b?c=d&e), <https://e.org>.", "<p>(L{https://e.org/a_b?c=d&amp;e|https://e.org/a_b?c=d&amp;e}), L{https://e.org|https://e.org/}.</p>"),
    ("![p](https://e.org/p.png)", "<p>L{Image: p|https://e.org/p.png}</p>"),
    ("[![p](https://e.org/p.png)](https://e.org/q)", "<p>L{Image: p|https://e.org/q}</p>"),
    ("e.org www.e.org mailto:a@e.org a@e.org ftp://e.org <a@e.org>",
     "<p>e.org www.e.org mailto:a@e.org a@e.org ftp://e.org &lt;a@e.org&gt;</p>"),
    ("[a]: https://e.org\n[a]", "<p>[a]: L{https://e.org|https://e.org/}<br>[a]</p>"),
    ("~~~py x\na\n  b\n~~~\nc", "C{py|a\n  b}<p>c</p>"),
    ("```\nnot closed\n# x", "C{code|not closed\n# x}"),
    ("- a\n  ```\n  b\n  ```", "<ul><li>aC{code|b}</li></ul>"),
    ("    a\n     b\n\nc", "C{code|a\n b}<p>c</p>"),
    ("x\r\n\r\ny", "<p>x</p><p>y</p>"),
)  # fmt: skip

RENDER = """async ([texts, step]) => {
  const { renderMarkdown } = await import("/markdown.js");
  return texts.map((text) => {
    const box = document.createElement("div");
    for (let n = step || text.length; n < text.length; n += step) renderMarkdown(box, text.slice(0, n));
    renderMarkdown(box, text);
    if (box.querySelector("a a")) return "a link within a link";
    for (const code of box.querySelectorAll(".code")) {
      code.replaceWith(`C{${code.querySelector("span").textContent}|${code.querySelector("pre").textContent}}`);
    }
    for (const link of box.querySelectorAll("a")) {
      link.replaceWith(`L{${link.textContent}|${link.getAttribute("href")}}`);
    }
    return box.innerHTML.replaceAll('<div class="table" tabindex="0"><table>', "TABLE")
      .replaceAll('<li class="task"><input type="checkbox" disabled="" aria-label="done">', "BOX")
      .replaceAll('<li class="task"><input type="checkbox" disabled="" checked="" aria-label="done">', "DONE")
      .replaceAll(/<(t[hd]) style="text-align: center;">/g, (_, name) => `${name.toUpperCase()} `);
  });
}"""
