// Show messages; `actions` implements their buttons.

import { pictures } from "./attachments.js";
import { copyButton, grow, h, iconButton } from "./dom.js";
import { buildCode, renderMarkdown } from "./markdown.js";
import { children } from "./tree.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

// One message; `update` changes in place what differs while an answer arrives.
export class MessageView {
  constructor(conversation, node, actions) {
    this.conversation = conversation;
    this.node = node;
    this.actions = actions;
    this.body = h("div", { class: "body" });
    this.error = h("p", { class: "error" });
    this.stats = h("span", { class: "stats" });
    this.bar = h("div", { class: "bar-actions" });
    this.element = h("article", { class: `message ${node.role}`, "aria-label": NAMES[node.role], data: { id: node.id } },
      h("h2", { class: "who" }, NAMES[node.role]), this.body, this.error, this.bar);
    this.progress = "";
    this.update();
  }

  update() {
    const { node } = this;
    if (node.role === "assistant") this.updateAnswer();
    else {
      this.body.textContent = node.content;
      if (node.images?.length) this.body.prepend(pictures(node.images));
    }
    this.error.textContent = node.error || "";
    this.error.hidden = !node.error;
    this.element.classList.toggle("running", Boolean(node.pending));
    this.element.setAttribute("aria-busy", String(Boolean(node.pending)));
    this.stats.textContent = statsText(node, this.progress);
    if (this.bar.dataset.pending !== String(Boolean(node.pending))) this.updateBar();
  }

  updateAnswer() {
    const { node } = this;
    if (node.reasoning) this.updateReasoning();
    if (!this.text) {
      this.text = h("div", { class: "markdown" });
      this.body.append(this.text);
    }
    renderMarkdown(this.text, node.content);
    if (node.toolCalls?.length) this.updateCalls();
    if (node.pending && !node.content && !node.reasoning && !node.toolCalls?.length) {
      this.wait ??= this.body.appendChild(h("p", { class: "wait" }, h("span", { class: "hidden" }, "Waiting for the answer")));
    } else {
      this.wait?.remove();
      this.wait = undefined;
    }
  }

  updateReasoning() {
    const { node } = this;
    if (!this.reasoning) {
      this.reasoningText = h("div", { class: "markdown" });
      this.reasoningTitle = h("summary");
      this.reasoning = h("details", { class: "reasoning" }, this.reasoningTitle, this.reasoningText);
      this.now = h("button", { type: "button", class: "now", on: { click: () => this.actions.answerNow() } }, "Answer now");
      this.body.prepend(this.reasoning, this.now);
    }
    const thinking = node.pending && !node.content && !node.toolCalls?.length;
    this.reasoningTitle.textContent = thinking ? "Reasoning …" : "Reasoning";
    this.now.hidden = !thinking;
    renderMarkdown(this.reasoningText, node.reasoning);
  }

  updateCalls() {
    const { node } = this;
    if (!this.calls) {
      this.calls = h("div", { class: "calls" });
      this.body.append(this.calls);
    }
    const shown = JSON.stringify([node.toolCalls, node.pending]);
    if (this.calls.dataset.shown === shown) return;
    this.calls.dataset.shown = shown;
    const answered = children(this.conversation, node.id).some((child) => child.role === "tool");
    this.calls.replaceChildren(...node.toolCalls.map((call) => callView(call)));
    if (!node.pending && !answered) this.calls.append(this.resultForm());
  }

  resultForm() {
    const areas = this.node.toolCalls.map((call, i) => h("textarea", { rows: 2, "aria-label": `Result of ${call.name || `call ${i + 1}`}`,
      placeholder: `Result of ${call.name || "the call"}` }));
    const submit = (event) => {
      event.preventDefault();
      this.actions.toolResults(this.node, areas.map((area) => area.value));
    };
    return h("form", { on: { submit } }, ...areas, h("button", { type: "submit" }, "Send the result"));
  }

  updateBar() {
    const { node, actions } = this;
    this.bar.dataset.pending = String(Boolean(node.pending));
    const parts = [];
    const family = children(this.conversation, node.parent);
    if (!node.pending) {
      if (family.length > 1) parts.push(this.branches(family));
      parts.push(copyButton("Copy the message", () => node.content));
      if (node.role !== "tool") parts.push(iconButton("edit", "Edit the message", () => this.edit()));
      if (node.role === "assistant") parts.push(iconButton("redo", "Answer again", () => actions.regenerate(node)));
    }
    this.bar.replaceChildren(...parts, this.stats);
  }

  branches(family) {
    const at = family.findIndex((item) => item.id === this.node.id);
    const go = (step) => () => this.actions.choose(family[at + step].id);
    return h("span", { class: "branches" },
      iconButton("left", "Version before", go(-1), { disabled: at === 0 }),
      h("span", { "aria-label": `Version ${at + 1} of ${family.length}` }, `${at + 1}/${family.length}`),
      iconButton("right", "Version after", go(1), { disabled: at === family.length - 1 }));
  }

  // Edit in a text field: a user's message is sent again, an answer is only changed.
  edit() {
    if (this.form) return;
    const { node } = this;
    const area = h("textarea", { "aria-label": "Edit the message", on: { input: () => grow(area) } });
    area.value = node.content;
    const close = () => {
      this.form.remove();
      this.form = undefined;
      this.body.hidden = this.bar.hidden = false;
      this.bar.querySelector('[aria-label="Edit the message"]')?.focus();
    };
    const submit = (event) => {
      event?.preventDefault();
      if (node.role === "user" && !area.value.trim() && !node.images?.length) return;
      close();
      this.actions.edited(node, area.value);
    };
    const keys = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.isComposing && (node.role === "user" ? !event.shiftKey : event.ctrlKey || event.metaKey)) {
        submit(event);
      }
    };
    area.addEventListener("keydown", keys);
    this.form = h("form", { class: "edit", on: { submit } }, area, h("div", { class: "dialog-foot" }, h("span", { class: "grow" }),
      h("button", { type: "button", on: { click: close } }, "Cancel"),
      h("button", { type: "submit", class: "main" }, node.role === "user" ? "Send" : "Save")));
    this.body.hidden = this.bar.hidden = true;
    this.body.before(this.form);
    grow(area);
    area.focus();
  }
}

function callView(call) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // incomplete or not JSON: show it unchanged
  }
  return h("div", { class: "call" }, h("p", {}, "Calls ", h("code", {}, call.name || "…")), buildCode(text, "json"));
}

const rate = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));

export function speedText(stats) {
  return stats?.predicted_per_second > 0 ? `${rate(stats.predicted_per_second)} tokens/s` : "";
}

function statsText(node, progress) {
  if (node.role !== "assistant") return "";
  if (node.pending && progress) return progress;
  const { stats } = node;
  const parts = [];
  if (node.stopped) parts.push("stopped");
  else if (node.finish === "length") parts.push("cut off at the token limit");
  if (stats?.predicted_n) parts.push(`${stats.predicted_n} tokens`, speedText(stats));
  if (stats?.prompt_n && stats.prompt_per_second > 0 && !node.pending) {
    parts.push(`prompt ${stats.prompt_n + (stats.cache_n || 0)} tokens, ${rate(stats.prompt_per_second)} tokens/s`);
  }
  return parts.filter(Boolean).join(" · ");
}
