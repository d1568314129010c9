// Markdown to DOM nodes. Nothing is ever parsed as HTML: text becomes text nodes, links go to http and https only,
// images are shown as links, so that no text of a model can run anything or call another host by itself.

import { copyButton, h } from "./dom.js";
import { highlight } from "./highlight.js";

const MAX_DEPTH = 12; // of lists, quotes and emphasis inside each other
const MAX_SPAN = 4000; // characters looked ahead for the end of an emphasis or a link
const MAX_FAILED = 200; // marks without an end in one paragraph, after which marks are text: keeps odd text quick
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-+*]|\d{1,9}[.)])([ \t]+|$)/;
const DELIMITER = /^ {0,3}\|?(?:[ \t]*:?-+:?[ \t]*\|)+(?:[ \t]*:?-+:?[ \t]*)?$/;
const ENTITIES = { "&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };

const indentOf = (line) => line.length - line.trimStart().length;
const expand = (line) => line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));

export function safeUrl(text) {
  try {
    const url = new URL(text.trim());
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null;
  }
}

// Shows `text` in `container`; blocks that did not change since the last call stay as they are.
export function renderMarkdown(container, text) {
  const blocks = splitBlocks(toLines(text));
  const old = container.blockSources || [];
  let same = 0;
  while (same < blocks.length && same < old.length && blocks[same].source === old[same]) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(buildBlock(block, 0));
  container.blockSources = blocks.map((block) => block.source);
}

const toLines = (text) => text.replace(/\r\n?/g, "\n").split("\n").map(expand);

// Blocks

function splitBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = readBlock(lines, at);
    block.source = `${block.type}\n${lines.slice(at, block.end).join("\n")}`;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function readBlock(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return readFence(lines, at);
  if (HEADING.test(line)) return { type: "heading", end: at + 1, level: line.trim().match(/^#+/)[0].length, text: headingText(line) };
  if (RULE.test(line)) return { type: "rule", end: at + 1 };
  if (QUOTE.test(line)) return readQuote(lines, at);
  if (ITEM.test(line)) return readList(lines, at);
  if (isTable(lines, at)) return readTable(lines, at);
  if (/^ {4}/.test(line)) return readIndented(lines, at);
  return readParagraph(lines, at);
}

function headingText(line) {
  let text = line.trim().replace(/^#+/, "").trim();
  const end = text.replace(/#+$/, "");
  if (end === "" || end.endsWith(" ")) text = end.trim();
  return text;
}

function readFence(lines, at) {
  const [, fence, info] = lines[at].match(FENCE);
  const indent = indentOf(lines[at]);
  const body = [];
  let end = at + 1;
  for (; end < lines.length; end++) {
    const text = lines[end].trim();
    if (text.length >= fence.length && text === fence[0].repeat(text.length) && indentOf(lines[end]) < 4) {
      end++;
      break;
    }
    body.push(lines[end].slice(Math.min(indent, indentOf(lines[end]))));
  }
  return { type: "code", end, lang: info.trim().split(/\s/)[0] || "", text: body.join("\n") };
}

function readIndented(lines, at) {
  let end = at;
  for (let i = at; i < lines.length && (/^ {4}/.test(lines[i]) || !lines[i].trim()); i++) if (lines[i].trim()) end = i + 1;
  return { type: "code", end, lang: "", text: lines.slice(at, end).map((line) => line.slice(4)).join("\n") };
}

const interrupts = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
  || (ITEM.test(line) && /^ {0,3}(?:[-+*]|1[.)])[ \t]+\S/.test(line));

function readQuote(lines, at) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end++) {
    if (QUOTE.test(lines[end])) inner.push(lines[end].replace(QUOTE, ""));
    else if (lines[end].trim() && !interrupts(lines[end]) && inner.at(-1).trim()) inner.push(lines[end]);
    else break;
  }
  return { type: "quote", end, lines: inner };
}

const kindOf = (marker) => (/\d/.test(marker) ? marker.at(-1) : marker);

function readList(lines, at) {
  const first = lines[at].match(ITEM);
  const kind = kindOf(first[2]);
  const list = { type: "list", ordered: /\d/.test(first[2]), start: parseInt(first[2], 10), items: [], loose: false };
  let edge = 0; // columns that belong to an item
  let base = 0;
  let blank = false;
  let i = at;
  for (; i < lines.length; i++) {
    const line = lines[i];
    if (!line.trim()) {
      blank = true;
      continue;
    }
    const indent = indentOf(line);
    const inside = list.items.length > 0 && indent >= Math.min(edge, base + 2);
    const item = inside ? null : line.match(ITEM);
    if (item && kindOf(item[2]) === kind && !RULE.test(line)) {
      if (blank && list.items.length) list.loose = true;
      base = item[1].length;
      edge = base + item[2].length + (item[3].length > 4 || !item[3] ? 1 : item[3].length);
      list.items.push([line.slice(edge)]);
    } else if (inside) {
      if (blank) list.items.at(-1).push("");
      list.items.at(-1).push(line.slice(Math.min(indent, edge)));
    } else if (!blank && !interrupts(line) && !item) {
      list.items.at(-1).push(line.trim());
    } else break;
    blank = false;
  }
  list.end = i;
  return list;
}

function isTable(lines, at) {
  const next = lines[at + 1];
  return lines[at].includes("|") && next !== undefined && next.length < MAX_SPAN && next.includes("|") && DELIMITER.test(next)
    && cells(lines[at]).length === cells(next).length;
}

function cells(line) {
  const out = [""];
  const text = line.trim().replace(/^\|/, "");
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\" && text[i + 1] === "|") out[out.length - 1] += text[++i];
    else if (text[i] === "|") out.push("");
    else out[out.length - 1] += text[i];
  }
  if (out.length > 1 && !out.at(-1).trim()) out.pop();
  return out.map((cell) => cell.trim());
}

function readTable(lines, at) {
  const align = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && lines[end].trim() && !interrupts(lines[end]); end++) rows.push(cells(lines[end]));
  return { type: "table", end, head: cells(lines[at]), align, rows };
}

function readParagraph(lines, at) {
  const text = [lines[at].trimStart()];
  let end = at + 1;
  for (; end < lines.length; end++) {
    const line = lines[end];
    const under = line.match(/^ {0,3}(=+|-{2,})[ \t]*$/);
    if (under) return { type: "heading", end: end + 1, level: under[1][0] === "=" ? 1 : 2, text: text.join("\n") };
    if (!line.trim() || interrupts(line) || isTable(lines, end)) break;
    text.push(line.trimStart());
  }
  return { type: "paragraph", end, text: text.join("\n") };
}

function buildBlock(block, depth) {
  switch (block.type) {
    case "heading": return h(`h${Math.min(block.level + 2, 6)}`, { class: `h${block.level}` }, ...inline(block.text, 0));
    case "rule": return h("hr");
    case "code": return buildCode(block.text, block.lang);
    case "quote": return h("blockquote", {}, ...buildAll(block.lines, depth + 1));
    case "list": return buildList(block, depth + 1);
    case "table": return buildTable(block);
    default: return h("p", {}, ...inline(block.text.trimEnd(), 0));
  }
}

function buildAll(lines, depth) {
  if (depth > MAX_DEPTH) return [h("p", {}, lines.join("\n"))];
  return splitBlocks(lines).map((block) => buildBlock(block, depth));
}

export function buildCode(text, lang) {
  const code = h("code");
  highlight(code, text, lang.toLowerCase());
  const head = h("div", { class: "code-head" }, h("span", {}, lang || "code"), copyButton("Copy the code", () => text));
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, code));
}

function buildList(list, depth) {
  const items = list.items.map((lines) => {
    const item = h("li");
    const task = lines[0].match(/^\[([ xX])\] /);
    if (task) {
      item.className = "task";
      item.append(h("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "done" }));
      lines = [lines[0].slice(4), ...lines.slice(1)];
    }
    for (const node of buildAll(lines, depth)) {
      if (!list.loose && node.tagName === "P") item.append(...node.childNodes);
      else item.append(node);
    }
    return item;
  });
  if (!list.ordered) return h("ul", {}, ...items);
  return h("ol", { start: list.start === 1 ? null : list.start }, ...items);
}

function buildTable(table) {
  const cell = (tag, text, i) => {
    const node = h(tag, {}, ...inline(text, 0));
    if (table.align[i]) node.style.textAlign = table.align[i];
    return node;
  };
  const head = h("tr", {}, ...table.head.map((text, i) => cell("th", text, i)));
  const rows = table.rows.map((row) => h("tr", {}, ...table.head.map((_, i) => cell("td", row[i] || "", i))));
  return h("div", { class: "table", tabindex: "0" }, h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows)));
}

// Text inside a block

function inline(text, depth) {
  if (depth > MAX_DEPTH) return [text];
  const out = [];
  const failed = { ticks: new Set(), marks: 0 }; // runs of backticks that nothing closes; other marks without an end
  let plain = "";
  let at = 0;
  const push = (node, end) => {
    if (plain) out.push(plain);
    plain = "";
    out.push(node);
    at = end;
  };
  while (at < text.length) {
    const found = special(text, at, depth, failed);
    if (!found) plain += text[at++];
    else if (found.node) push(found.node, found.end);
    else {
      plain += found.text;
      at = found.end;
    }
  }
  if (plain) out.push(plain);
  return out;
}

function special(text, at, depth, failed) {
  switch (text[at]) {
    case "\\": return escaped(text, at);
    case "`": return codeSpan(text, at, failed.ticks);
    case "*": case "_": case "~": return emphasis(text, at, depth, failed);
    case "[": return link(text, at, at, depth, failed);
    case "!": return text[at + 1] === "[" ? link(text, at, at + 1, depth, failed) : null;
    case "<": return angle(text, at);
    case "&": return entity(text, at);
    case "h": return bareUrl(text, at);
    case "\n": return { node: h("br"), end: at + 1 };
    default: return null;
  }
}

function escaped(text, at) {
  const next = text[at + 1];
  if (next === "\n") return { node: h("br"), end: at + 2 };
  return next && /[!-/:-@[-`{-~]/.test(next) ? { text: next, end: at + 2 } : null;
}

function codeSpan(text, at, noEnd) {
  let n = 1;
  while (text[at + n] === "`") n++;
  const run = "`".repeat(n);
  if (!noEnd.has(n)) {
    for (let end = text.indexOf(run, at + n); end >= 0; end = text.indexOf(run, end)) {
      let length = n;
      while (text[end + length] === "`") length++;
      if (length === n) {
        let code = text.slice(at + n, end).replaceAll("\n", " ");
        if (/^ .* $/.test(code) && code.trim()) code = code.slice(1, -1);
        return { node: h("code", {}, code), end: end + n };
      }
      end += length;
    }
    noEnd.add(n);
  }
  return { text: run, end: at + n };
}

const WORD = /[\p{L}\p{N}]/u;

function runLength(text, at) {
  let n = 1;
  while (text[at + n] === text[at]) n++;
  return n;
}

function emphasis(text, at, depth, failed) {
  const mark = text[at];
  const n = runLength(text, at);
  const literal = { text: mark.repeat(n), end: at + n };
  const after = text[at + n];
  if (n > 3 || !after || /\s/.test(after) || (mark === "~" && n !== 2)) return literal;
  if (mark === "_" && at > 0 && WORD.test(text[at - 1])) return literal;
  const end = failed.marks > MAX_FAILED ? -1 : closing(text, at + n, mark, n);
  if (end < 0) {
    failed.marks++;
    return literal;
  }
  const children = inline(text.slice(at + n, end), depth + 1);
  const names = mark === "~" ? ["del"] : n === 1 ? ["em"] : n === 2 ? ["strong"] : ["strong", "em"];
  const node = names.reverse().reduce((inner, name) => [h(name, {}, ...inner)], children)[0];
  return { node, end: end + n };
}

// Where the marks that end an emphasis of `n` marks begin, or -1.
function closing(text, from, mark, n) {
  const limit = Math.min(text.length, from + MAX_SPAN);
  for (let i = from; i < limit; i++) {
    if (text[i] === "\\") i++;
    else if (text[i] === "`") {
      const length = runLength(text, i);
      const end = text.indexOf("`".repeat(length), i + length);
      i = end < 0 || end > limit ? i + length - 1 : end + length - 1;
    } else if (text[i] === mark) {
      const length = runLength(text, i);
      const open = /\s/.test(text[i - 1]);
      const inWord = mark === "_" && text[i + length] && WORD.test(text[i + length]);
      if (!open && !inWord && i > from && (length === n || (length === 3 && n < 3))) return i + length - n;
      i += length - 1;
    }
  }
  return -1;
}

// [text](url "title"), and ![text](url), which becomes a link, too. Other kinds of addresses stay text.
function link(text, start, at, depth, failed) {
  if (failed.marks > MAX_FAILED) return null;
  let level = 0;
  let end = at;
  const limit = Math.min(text.length, at + MAX_SPAN);
  for (; end < limit; end++) {
    if (text[end] === "\\") end++;
    else if (text[end] === "[") level++;
    else if (text[end] === "]" && --level === 0) break;
  }
  if (end >= limit || text[end + 1] !== "(") {
    failed.marks++;
    return null;
  }
  const target = /^\(\s{0,9}(?:<([^<>\n]{0,2000})>|((?:[^\s()]|\([^\s()]{0,500}\)){1,2000}))(?:\s{1,9}(?:"[^"]{0,500}"|'[^']{0,500}'))?\s{0,9}\)/
    .exec(text.slice(end + 1, end + 1 + MAX_SPAN));
  const url = target && safeUrl(target[1] ?? target[2]);
  if (!url) return null;
  const label = text.slice(at + 1, end);
  const image = start !== at;
  const children = image ? [`Image: ${label || url}`] : inline(label, depth + 1).map(withoutLinks);
  return { node: anchor(url, children), end: end + 1 + target[0].length };
}

const withoutLinks = (node) => (node instanceof HTMLAnchorElement ? node.textContent : node);

function anchor(url, children) {
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function angle(text, at) {
  const rest = text.slice(at, at + 2000);
  const line = /^<br\s?\/?>/i.exec(rest);
  if (line) return { node: h("br"), end: at + line[0].length };
  const auto = /^<(https?:\/\/[^\s<>]+)>/i.exec(rest);
  const url = auto && safeUrl(auto[1]);
  return url ? { node: anchor(url, [auto[1]]), end: at + auto[0].length } : null;
}

function entity(text, at) {
  const found = /^&(?:lt|gt|amp|quot|nbsp|#39);/.exec(text.slice(at, at + 7));
  return found ? { text: ENTITIES[found[0]], end: at + found[0].length } : null;
}

function bareUrl(text, at) {
  if (!text.startsWith("http", at) || (at > 0 && WORD.test(text[at - 1]))) return null;
  const found = /^https?:\/\/[^\s<>"`]+/.exec(text.slice(at, at + 2000));
  if (!found) return null;
  let shown = found[0].replace(/[.,;:!?'*_~\]]+$/, "");
  if (shown.endsWith(")") && !shown.includes("(")) shown = shown.replace(/[).,;:!?'*_]+$/, "");
  const url = safeUrl(shown);
  return url ? { node: anchor(url, [shown]), end: at + shown.length } : null;
}
