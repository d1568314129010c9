// Markdown to DOM nodes. markdown-it parses; its HTML renderer is not used: text becomes text nodes, links go to http
// and https only, images are shown as links, so that no text of a model can run anything or call another host by itself.

import "./markdown-it.js";
import { copyButton, h } from "./dom.js";
import { highlight } from "./highlight.js";

const MAX_URL = 2000;
const ITEM = /^( {0,3})(\d{1,9}[.)])( +)\S/;
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})/;
const LINE_BREAK = /<br\s?\/?>/iy;
const UNSPACED = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}]/u;

const md = globalThis.markdownit({ html: false, linkify: true });
// Without definitions, which may stand anywhere, a block depends on its own lines alone.
md.disable("reference");
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
md.validateLink = (text) => safeUrl(text) !== null;
md.normalizeLink = (text) => safeUrl(text) ?? text;
md.normalizeLinkText = (text) => text;
md.inline.ruler.before("autolink", "line_break", (state, silent) => {
  LINE_BREAK.lastIndex = state.pos;
  const found = state.src[state.pos] === "<" && LINE_BREAK.exec(state.src);
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
});
// CommonMark would show the marks of **「a」**b, since a letter follows. Scripts without spaces need emphasis there.
md.inline.State = class extends md.inline.State {
  scanDelims(start, canSplitWord) {
    const found = super.scanDelims(start, canSplitWord);
    const [before, after] = [this.src[start - 1] ?? " ", this.src[start + found.length] ?? " "];
    if (canSplitWord && (UNSPACED.test(before) || UNSPACED.test(after))) {
      found.can_open ||= !/\s/.test(after);
      found.can_close ||= !/\s/.test(before);
    }
    return found;
  }
};

export function safeUrl(text) {
  try {
    const url = new URL(text.trim());
    return text.length <= MAX_URL && (url.protocol === "https:" || url.protocol === "http:") ? url.href : null;
  } catch {
    return null;
  }
}

// Show `text` in `container`; blocks that did not change since the last call stay as they are.
export function renderMarkdown(container, text) {
  const sources = splitBlocks(text);
  const old = container.blockSources || [];
  let same = 0;
  while (same < sources.length && same < old.length && sources[same] === old[same]) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const source of sources.slice(same)) container.append(build(md.parse(source, {})));
  container.blockSources = sources;
}

// Return the source of every outermost block; each makes one element.
function splitBlocks(text) {
  const lines = alignItems(text.replace(/\r\n?/g, "\n").split("\n"));
  const tokens = [];
  md.block.parse(lines.join("\n"), md, {}, tokens);
  const outermost = tokens.filter((token) => token.level === 0 && token.nesting >= 0 && token.map);
  return outermost.map(({ map: [begin, end] }) => lines.slice(begin, end).join("\n"));
}

// Many models indent what belongs to "1. a" by two columns, where CommonMark wants as many as the marker has.
function alignItems(lines) {
  let fence = "";
  let item = null;
  return lines.map((line) => {
    const indent = line.search(/\S/);
    if (indent < 0) return line;
    if (item && indent >= item.indent + 2) {
      item.shift ??= Math.max(item.width - indent, 0);
      return " ".repeat(item.shift) + line;
    }
    item = null;
    const mark = FENCE.exec(line)?.[1];
    if (fence) {
      if (line.trim() === line.trim()[0].repeat(line.trim().length) && mark?.startsWith(fence)) fence = "";
    } else if (mark) {
      fence = mark;
    } else {
      const found = ITEM.exec(line);
      if (found) item = { indent, width: found[0].length - 1 - (found[3].length > 4 ? found[3].length - 1 : 0) };
    }
    return line;
  });
}

// Tokens to nodes

function build(tokens) {
  const root = document.createDocumentFragment();
  const stack = [root];
  tokens.forEach((token, i) => {
    const parent = stack.at(-1);
    if (token.type === "inline") {
      if (tokens[i - 2]?.type === "list_item_open") markTask(parent.closest("li"), token.children[0]);
      parent.append(build(token.children));
    } else if (token.nesting < 0) {
      stack.pop();
    } else if (token.nesting > 0) {
      const node = token.hidden ? parent : element(token, parent);
      if (!token.hidden) parent.append(token.tag === "table" ? h("div", { class: "table", tabindex: "0" }, node) : node);
      stack.push(node);
    } else {
      parent.append(leaf(token, parent));
    }
  });
  return root;
}

function element(token, parent) {
  const attr = (name) => token.attrGet(name);
  switch (token.type) {
    case "heading_open": return h(`h${Math.min(Number(token.tag[1]) + 2, 6)}`, { class: token.tag });
    case "ordered_list_open": return h("ol", { start: attr("start") });
    case "s_open": return h("del");
    case "link_open": return anchor(attr("href"));
    case "th_open": case "td_open": {
      const cell = h(token.tag);
      cell.style.textAlign = attr("style")?.replace("text-align:", "") ?? "";
      return cell;
    }
    default: return h(token.tag);
  }
}

function leaf(token, parent) {
  switch (token.type) {
    case "fence": case "code_block": return buildCode(token.content.replace(/\n$/, ""), token.info.trim().split(/\s/)[0]);
    case "code_inline": return h("code", {}, token.content);
    case "softbreak": case "hardbreak": return h("br");
    case "hr": return h("hr");
    case "image": {
      const label = `Image: ${token.content || token.attrGet("src")}`;
      return parent.closest?.("a") ? label : anchor(token.attrGet("src"), label);
    }
    default: return token.content;
  }
}

function anchor(url, ...children) {
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

// Turn "[ ] " and "[x] " at the beginning of an item into a checkbox.
function markTask(item, text) {
  const found = /^\[([ xX])\] /.exec(text?.content ?? "");
  if (!found) return;
  text.content = text.content.slice(found[0].length);
  item.className = "task";
  item.prepend(h("input", { type: "checkbox", disabled: true, checked: found[1] !== " ", "aria-label": "done" }));
}

export function buildCode(text, lang) {
  const code = h("code");
  highlight(code, text, lang.toLowerCase());
  const head = h("div", { class: "code-head" }, h("span", {}, lang || "code"), copyButton("Copy the code", () => text));
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, code));
}
