// Conversations. Messages form a tree: another answer to the same question, or an edited question, is a sibling, and
// nothing is lost. `leaf` is the end of the branch that is shown.

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");

export function newConversation(system = "") {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system, nodes: {}, leaf: null };
}

export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent, content: "", time: Date.now(), ...fields };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = node.time;
  return node;
}

// Return the messages from the first to `leaf`.
export function path(conversation, leaf = conversation.leaf) {
  const out = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) out.push(node);
  return out.reverse();
}

export function children(conversation, parent) {
  return Object.values(conversation.nodes).filter((node) => node.parent === parent);
}

// Select the branch through `id`, down to its latest message.
export function choose(conversation, id) {
  for (let below = children(conversation, id); below.length; below = children(conversation, id)) id = below.at(-1).id;
  conversation.leaf = id;
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = path(conversation).find((node) => node.role === "user");
  const text = first ? first.content.trim().replace(/\s+/g, " ") : "";
  return text.length > 60 ? `${text.slice(0, 59)}…` : text || "New conversation";
}

// Return the messages that a request sends for a branch.
export function toMessages(conversation, leaf) {
  const out = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  for (const node of path(conversation, leaf)) {
    if (node.role === "tool") {
      out.push({ role: "tool", tool_call_id: node.callId, content: node.content });
    } else if (node.role === "user") {
      // skip a failed answer: two questions in a row become one, as many templates require
      if (out.at(-1)?.role === "user") out.at(-1).content = joined(out.at(-1).content, contentOf(node));
      else out.push({ role: "user", content: contentOf(node) });
    } else {
      const calls = (node.toolCalls ?? []).filter(isWhole);
      if (!node.content && !node.reasoning && !calls.length) continue;
      const message = { role: "assistant", content: node.content };
      if (node.reasoning) message.reasoning_content = node.reasoning;
      if (calls.length) message.tool_calls = calls.map(toCall);
      out.push(message);
    }
  }
  return out;
}

// Return text, or a list of parts if there are images, which stand before the text.
function contentOf(node) {
  if (!node.images?.length) return node.content;
  const images = node.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return node.content ? [...images, { type: "text", text: node.content }] : images;
}

function joined(before, after) {
  if (typeof before === "string" && typeof after === "string") return `${before}\n\n${after}`;
  return [before, after].flatMap((content) => (typeof content === "string" ? [{ type: "text", text: content }] : content));
}

// Return false for calls that were cut off.
function isWhole(call) {
  try {
    JSON.parse(call.arguments);
    return Boolean(call.name);
  } catch {
    return false;
  }
}

const toCall = (call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } });

// Files

export function exportText(conversations) {
  return JSON.stringify({ format: "ik-conversations", version: 1, conversations }, null, 1);
}

// Return the conversations of an exported file, with new ids; throw an Error that says what is wrong.
export function importText(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (data?.format !== "ik-conversations" || !Array.isArray(data.conversations)) {
    throw new Error("The file holds no conversations exported by this page.");
  }
  if (data.version !== 1) throw new Error(`The file has version ${data.version}; this page reads version 1.`);
  return data.conversations.map(importOne);
}

const str = (value) => (typeof value === "string" ? value : "");
const num = (value) => (Number.isFinite(value) ? value : 0);

function importOne(data) {
  if (typeof data?.nodes !== "object" || data.nodes === null) throw new Error("A conversation of the file has no messages.");
  const out = { ...newConversation(str(data.system)), title: str(data.title).slice(0, 200) };
  out.created = num(data.created) || out.created;
  out.updated = num(data.updated) || out.updated;
  const ids = new Map(Object.keys(data.nodes).map((id) => [id, newId()]));
  for (const [id, node] of Object.entries(data.nodes)) {
    if (!["user", "assistant", "tool"].includes(node?.role)) throw new Error("A message of the file has no known role.");
    out.nodes[ids.get(id)] = { ...importNode(node), id: ids.get(id), parent: ids.get(node.parent) ?? null };
  }
  for (const id of Object.keys(out.nodes)) checkEnds(out, id);
  out.leaf = ids.get(data.leaf) ?? null;
  if (out.leaf === null && ids.size) choose(out, children(out, null)[0].id);
  return out;
}

function importNode(node) {
  const out = { role: node.role, content: str(node.content), time: num(node.time) };
  if (node.reasoning) out.reasoning = str(node.reasoning);
  if (Array.isArray(node.images)) out.images = node.images.filter((url) => typeof url === "string" && url.startsWith("data:image/"));
  if (node.callId) out.callId = str(node.callId);
  if (node.finish) out.finish = str(node.finish);
  if (node.error) out.error = str(node.error);
  if (Array.isArray(node.toolCalls)) {
    out.toolCalls = node.toolCalls.map((call) => ({ id: str(call?.id), name: str(call?.name), arguments: str(call?.arguments) }));
  }
  if (node.stats && typeof node.stats === "object") {
    out.stats = Object.fromEntries(Object.entries(node.stats).filter(([, value]) => Number.isFinite(value)));
  }
  return out;
}

function checkEnds(conversation, id) {
  const seen = new Set();
  for (let at = id; at !== null; at = conversation.nodes[at].parent) {
    if (seen.has(at)) throw new Error("The messages of a conversation of the file go round in a circle.");
    seen.add(at);
  }
}
