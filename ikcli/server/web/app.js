// The page: its state, what it shows, and how it reacts to events.

import { getJson, isUp, postJson, ServerError, streamChat } from "./api.js";
import { Attachments } from "./attachments.js";
import { byId, download, grow, h, icon } from "./dom.js";
import { MessageView, speedText } from "./messages.js";
import { requestFields, SettingsDialog } from "./settings.js";
import { ask, showList } from "./sidebar.js";
import * as store from "./store.js";
import { addNode, choose, exportText, importText, newConversation, path, titleOf, toMessages } from "./tree.js";

const SAVE_MS = 1500; // between two saves while an answer arrives
const RETRY_MS = 2000;

const state = {
  conversations: [],
  current: newConversation(),
  runs: new Map(), // conversation id -> { controller, node }
  views: new Map(), // message id -> MessageView
  server: {},
  preset: {}, // settings that the server names (--ui-config)
  nCtx: 0,
};

const settings = () => ({ ...state.preset, ...store.readSettings() });

const scroll = byId("scroll");
const input = byId("input");
let follow = true;

// Showing

function showAll() {
  const { current } = state;
  state.views = new Map(path(current).map((node) => [node.id, new MessageView(current, node, actions)]));
  byId("messages").replaceChildren(...[...state.views.values()].map((view) => view.element));
  const system = byId("system");
  if (document.activeElement !== system) system.value = current.system;
  byId("system-box").classList.toggle("set", Boolean(current.system.trim()));
  showFrame();
  toEnd();
}

function showFrame() {
  const { current } = state;
  const title = titleOf(current);
  byId("title").textContent = title;
  document.title = current.leaf ? `${title} – ik` : "ik";
  byId("empty").hidden = current.leaf !== null;
  const running = state.runs.has(current.id);
  byId("stop").hidden = !running;
  byId("send").hidden = running;
  showList(state.conversations, current, state.runs, listActions);
  showNumbers();
}

function showNumbers() {
  const last = path(state.current).findLast((node) => node.stats);
  byId("speed").textContent = speedText(last?.stats);
  const size = last?.stats?.n_ctx || state.nCtx;
  const used = last?.stats?.n_past || 0;
  byId("context").hidden = !size;
  const share = size ? Math.min(used / size, 1) : 0;
  byId("fill").style.width = `${100 * share}%`;
  byId("fill").classList.toggle("full", share > 0.9);
  byId("context-text").textContent = `${used.toLocaleString("en")} / ${size.toLocaleString("en")} tokens`;
}

function showBanner(text, button = null) {
  const banner = byId("banner");
  banner.hidden = !text;
  banner.replaceChildren(...(text ? [h("span", {}, text), button].filter(Boolean) : []));
}

function say(text) {
  byId("status").textContent = text;
}

const atEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;

function toEnd() {
  follow = true;
  scroll.scrollTop = scroll.scrollHeight;
  byId("to-end").hidden = true;
}

// Conversations

function keep(conversation) {
  if (!state.conversations.includes(conversation)) state.conversations.push(conversation);
  store.saveConversation(conversation).catch((error) => showBanner(`The browser could not save the conversation: ${error?.message ?? error}`));
}

function open(conversation) {
  state.current = conversation;
  store.writeText("current", conversation.id);
  showAll();
  closeMenu();
}

function startNew() {
  open(newConversation(settings().system || ""));
  input.focus();
}

const listActions = {
  open,
  async rename(conversation) {
    const title = await ask({ title: "Rename the conversation", value: titleOf(conversation), yes: "Rename" });
    if (title === null) return;
    conversation.title = title;
    keep(conversation);
    showFrame();
  },
  exportOne(conversation) {
    const name = titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40).replace(/^-+|-+$/g, "");
    download(`${name || "conversation"}.json`, exportText([conversation]));
  },
  async remove(conversation) {
    const sure = await ask({ title: "Delete the conversation?", text: titleOf(conversation), yes: "Delete", danger: true });
    if (!sure) return;
    halt(conversation);
    state.conversations = state.conversations.filter((item) => item !== conversation);
    await store.deleteConversation(conversation.id);
    if (conversation === state.current) startNew();
    else showFrame();
  },
};

async function importFile(file) {
  try {
    const found = importText(await file.text());
    found.forEach(keep);
    if (found.length) open(found[0]);
    say(`${found.length} conversations imported`);
    showBanner("");
  } catch (error) {
    showBanner(`Import: ${error.message}`);
  }
}

// Answers

// Abort the pending request of a conversation at once.
function halt(conversation) {
  const run = state.runs.get(conversation.id);
  if (!run) return;
  state.runs.delete(conversation.id);
  run.controller.abort();
  run.node.stopped = true;
  delete run.node.pending;
}

const attachments = new Attachments(() => Boolean(state.server.modalities?.vision), () => serverRead, showBanner);

function send(text) {
  const { current } = state;
  if ((!text.trim() && !attachments.urls.length) || state.runs.has(current.id)) return false;
  addNode(current, current.leaf, { role: "user", content: text, ...withImages(attachments.take()) });
  answer(current);
  return true;
}

const withImages = (images) => (images?.length ? { images } : {});

const actions = {
  regenerate(node) {
    halt(state.current);
    state.current.leaf = node.parent;
    answer(state.current);
  },
  // Ask the model to end its reasoning; the stream shows whether it does.
  answerNow() {
    const run = state.runs.get(state.current.id);
    if (run?.id) postJson("v1/chat/completions/control", { id: run.id, action: "reasoning_end" }).catch((error) => showBanner(error.message));
  },
  edited(node, text) {
    const { current } = state;
    if (node.role === "user") {
      halt(current);
      addNode(current, node.parent, { role: "user", content: text, ...withImages(node.images) });
      answer(current);
    } else {
      node.content = text;
      keep(current);
      state.views.get(node.id)?.update();
    }
  },
  choose(id) {
    halt(state.current);
    choose(state.current, id);
    keep(state.current);
    showAll();
    const { element } = state.views.get(id);
    element.scrollIntoView({ block: "nearest" });
    element.querySelector(".branches button:enabled")?.focus();
  },
  toolResults(node, results) {
    const { current } = state;
    halt(current);
    current.leaf = node.id;
    node.toolCalls.forEach((call, i) => addNode(current, current.leaf, { role: "tool", callId: call.id, content: results[i] }));
    answer(current);
  },
};

async function answer(conversation) {
  const parent = conversation.leaf;
  const messages = toMessages(conversation, parent);
  const node = addNode(conversation, parent, { role: "assistant", pending: true });
  const run = { controller: new AbortController(), node, progress: "", dirty: false, saved: Date.now() };
  state.runs.set(conversation.id, run);
  keep(conversation);
  showBanner("");
  say("The answer is coming");
  if (conversation === state.current) {
    showAll();
    if (document.activeElement === document.body && !touch.matches) input.focus();
  }
  try {
    const fixed = { messages, stream: true, stream_options: { include_usage: true }, timings_per_token: true, return_progress: true,
      reasoning_control: true };
    const body = { ...requestFields(settings()), ...fixed };
    for await (const chunk of streamChat(body, run.controller.signal)) {
      take(node, chunk, run);
      refresh(conversation, run);
    }
  } catch (error) {
    if (error.name === "AbortError") node.stopped = true;
    else fail(node, error);
  }
  finish(conversation, node, run);
}

function finish(conversation, node, run) {
  delete node.pending;
  if (state.runs.get(conversation.id) === run) state.runs.delete(conversation.id);
  if (state.conversations.includes(conversation)) keep(conversation);
  say(node.error ? `Error: ${node.error}` : node.stopped ? "Stopped" : "The answer is complete");
  if (conversation !== state.current) {
    showFrame();
    return;
  }
  state.views.get(node.id)?.update();
  showFrame();
  if (follow) toEnd();
}

function fail(node, error) {
  node.error = error instanceof ServerError ? error.message : `The page could not read the answer: ${error.message}`;
  if (error.status === 401) askForKey();
  else if (error instanceof ServerError && (error.status === 0 || error.status === 503)) watchServer();
}

function take(node, chunk, run) {
  const progress = chunk.prompt_progress;
  if (progress && progress.total > 0) {
    run.progress = `reading the prompt: ${Math.round((100 * progress.processed) / progress.total)} %`;
  }
  if (chunk.id) run.id = chunk.id;
  if (chunk.timings) node.stats = chunk.timings;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta } = choice;
  if (delta?.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
  if (delta?.content) node.content += delta.content;
  for (const part of delta?.tool_calls ?? []) takeCall(node, part);
  if (choice.finish_reason) node.finish = choice.finish_reason;
  if (delta?.content || delta?.reasoning_content || delta?.tool_calls) run.progress = "";
}

function takeCall(node, part) {
  node.toolCalls ??= [];
  const call = (node.toolCalls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
  if (part.id) call.id = part.id;
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

// Redraw at most once per frame, less often if drawing is slow.
function refresh(conversation, run) {
  if (run.dirty) return;
  run.dirty = true;
  setTimeout(() => requestAnimationFrame(() => {
    run.dirty = false;
    if (Date.now() - run.saved > SAVE_MS && state.conversations.includes(conversation)) {
      run.saved = Date.now();
      keep(conversation);
    }
    const view = state.views.get(run.node.id);
    if (!view || conversation !== state.current || !run.node.pending) return;
    const begun = performance.now();
    view.progress = run.progress;
    view.update();
    showNumbers();
    if (follow) scroll.scrollTop = scroll.scrollHeight;
    run.wait = Math.min(4 * (performance.now() - begun), 500);
  }), run.wait ?? 0);
}

const stop = () => state.runs.get(state.current.id)?.controller.abort();

// The server

let serverRead; // whether the server said what it runs; if not, the banner says why

const readServer = () => (serverRead = askServer());

async function askServer() {
  try {
    state.server = await getJson("props");
  } catch (error) {
    if (error.status === 401) askForKey();
    else {
      showBanner(error.message);
      watchServer();
    }
    return false;
  }
  state.preset = await getJson("ui-config.json").catch(() => ({}));
  if (state.preset.system && !state.current.system) showSystem();
  state.nCtx = state.server.default_generation_settings?.n_ctx ?? 0;
  byId("model").textContent = state.server.model_alias || state.server.model_name || "";
  attachments.show();
  showBanner("");
  showNumbers();
  return true;
}

let watching = false;

async function watchServer() {
  if (watching) return;
  watching = true;
  while (!(await isUp())) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  watching = false;
  await readServer();
}

function askForKey() {
  showBanner("The server wants an API key.", h("button", { type: "button", on: { click: () => dialog.open("set-key") } }, "Enter the key"));
}

// A new conversation takes the system prompt from the settings.
function showSystem() {
  if (state.current.leaf || state.conversations.includes(state.current)) return;
  state.current.system = settings().system || "";
  showAll();
}

const dialog = new SettingsDialog(() => state.server.default_generation_settings ?? {}, () => state.preset, () => {
  showSystem();
  readServer();
});

// Controls

const THEMES = ["auto", "light", "dark"];

function showTheme() {
  const theme = document.documentElement.dataset.theme;
  const names = { auto: "as the system", light: "light", dark: "dark" };
  byId("theme").replaceChildren(icon(theme));
  byId("theme").setAttribute("aria-label", `Colours: ${names[theme]}`);
  byId("theme").title = `Colours: ${names[theme]}`;
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  document.documentElement.dataset.theme = theme;
  store.writeText("theme", theme);
  showTheme();
}

const touch = window.matchMedia("(hover: none) and (pointer: coarse)"); // Enter inserts a line break there
const narrow = window.matchMedia("(max-width: 47.99rem)");

function openMenu() {
  document.body.classList.add("menu-open");
  byId("menu").setAttribute("aria-expanded", "true");
  byId("shade").hidden = false;
  document.querySelector("main").inert = true;
  byId("sidebar").inert = false;
  byId("close-menu").focus();
}

function closeMenu() {
  const was = document.body.classList.contains("menu-open");
  document.body.classList.remove("menu-open");
  byId("menu").setAttribute("aria-expanded", "false");
  byId("shade").hidden = true;
  document.querySelector("main").inert = false;
  byId("sidebar").inert = narrow.matches;
  if (was) byId("menu").focus();
}

function onKey(event) {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("menu-open")) closeMenu();
  else stop();
}

function onInputKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
}

function connect() {
  for (const [id, name] of Object.entries({ menu: "menu", "close-menu": "close", "settings-open": "settings", send: "send", stop: "stop",
    "to-end": "down" })) byId(id).append(icon(name));
  byId("new").prepend(icon("plus"));
  const clicks = {
    new: startNew, menu: openMenu, "close-menu": closeMenu, shade: closeMenu, theme: nextTheme, stop, "to-end": toEnd,
    "settings-open": () => dialog.open(), import: () => byId("import-file").click(),
    "export-all": () => download("conversations.json", exportText(state.conversations)),
  };
  for (const [id, listener] of Object.entries(clicks)) byId(id).addEventListener("click", listener);
  byId("import-file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (file) await importFile(file);
    event.target.value = "";
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!send(input.value)) return;
    input.value = "";
    grow(input);
  });
  input.addEventListener("keydown", onInputKey);
  input.addEventListener("input", () => grow(input));
  byId("system").addEventListener("change", (event) => {
    state.current.system = event.target.value;
    byId("system-box").classList.toggle("set", Boolean(state.current.system.trim()));
    if (state.current.leaf) keep(state.current);
  });
  scroll.addEventListener("scroll", () => {
    follow = atEnd();
    byId("to-end").hidden = follow;
  }, { passive: true });
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "hidden") state.conversations.filter((item) => state.runs.has(item.id)).forEach(keep);
  });
  narrow.addEventListener("change", closeMenu);
}

async function start() {
  connect();
  showTheme();
  closeMenu();
  readServer();
  state.conversations = await store.loadConversations();
  for (const conversation of state.conversations) {
    for (const node of Object.values(conversation.nodes)) {
      if (node.pending) node.stopped = true; // the page was closed before the answer ended
      delete node.pending;
    }
  }
  const last = state.conversations.find((item) => item.id === store.readText("current"));
  open(last ?? newConversation(settings().system || ""));
  if (!(await store.kept())) byId("empty").textContent = "Ask something. This browser keeps no conversations: its storage is switched off.";
  if (!narrow.matches) input.focus();
  document.body.dataset.ready = "true";
}

start();
