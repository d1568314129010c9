// Talk to the server: URLs relative to the page, errors as sentences, server-sent events.

import { readKey } from "./store.js";

export class ServerError extends Error {
  constructor(message, { status = 0, type = "" } = {}) {
    super(message);
    this.status = status;
    this.type = type;
  }
}

const address = (name) => new URL(name, document.baseURI).href;

async function request(name, options = {}) {
  const key = readKey();
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(address(name), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // the body is not JSON: another program may sit in between
  }
  return new ServerError(explain(response.status, error), { status: response.status, type: String(error.type ?? "") });
}

function explain(status, error) {
  if (status === 401) return "The server wants an API key, and this one is missing or wrong.";
  if (error.type === "exceed_context_size_error") {
    const sizes = error.n_prompt_tokens && error.n_ctx
      ? `This conversation has ${error.n_prompt_tokens} tokens, but the context holds ${error.n_ctx}.`
      : "This conversation is longer than the context.";
    return `${sizes} Start a new conversation, or edit an earlier message.`;
  }
  if (status === 503) return "The model is still loading.";
  const text = typeof error.message === "string" && error.message ? error.message : `The server answered with status ${status}.`;
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export const getJson = async (name) => (await request(name)).json();
export const postJson = async (name, body) => (await request(name, { method: "POST", body: JSON.stringify(body) })).json();

export async function isUp() {
  try {
    await request("health");
    return true;
  } catch {
    return false;
  }
}

// Send a chat request and yield the chunks of its answer.
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  let done = false;
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") {
      done = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(explain(chunk.error.code, chunk.error), { status: chunk.error.code, type: chunk.error.type });
    yield chunk;
  }
  if (!done) throw new ServerError("The connection ended before the answer was complete.");
}

// Yield the data of server-sent events from a stream of bytes.
export async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection was lost before the answer was complete.");
      }
      rest += decoder.decode(part.value ?? new Uint8Array(), { stream: !part.done });
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (part.done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
