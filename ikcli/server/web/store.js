// What the browser keeps: conversations in IndexedDB (one record each, so that two tabs do not overwrite each other's),
// settings in localStorage. Without storage everything works until the page is closed.

const NAME = "conversations";

function openDatabase() {
  return new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open("ik", 1);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => request.result.createObjectStore(NAME, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
    request.onblocked = () => resolve(null);
  });
}

const database = openDatabase();

async function run(mode, action) {
  const db = await database;
  if (!db) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(NAME, mode);
    const request = action(transaction.objectStore(NAME));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

export const kept = async () => (await database) !== null;
export const loadConversations = async () => (await run("readonly", (store) => store.getAll())) ?? [];
export const saveConversation = (conversation) => run("readwrite", (store) => store.put(conversation));
export const deleteConversation = (id) => run("readwrite", (store) => store.delete(id));

function read(storage, key) {
  try {
    return window[storage].getItem(`ik.${key}`);
  } catch {
    return null;
  }
}

function write(storage, key, value) {
  try {
    if (value === null) window[storage].removeItem(`ik.${key}`);
    else window[storage].setItem(`ik.${key}`, value);
  } catch {
    // storage is full or disabled: the value lasts as long as the page
  }
}

export const readText = (key) => read("localStorage", key);
export const writeText = (key, value) => write("localStorage", key, value);

export function readSettings() {
  try {
    const found = JSON.parse(readText("settings") ?? "{}");
    return found && typeof found === "object" && !Array.isArray(found) ? found : {};
  } catch {
    return {};
  }
}

export const writeSettings = (settings) => writeText("settings", JSON.stringify(settings));

// The key lasts as long as the tab unless the user wants it remembered.
export const readKey = () => read("sessionStorage", "key") ?? readText("key") ?? "";

export function writeKey(key, remember) {
  write("sessionStorage", "key", key || null);
  writeText("key", remember && key ? key : null);
}

export const keyRemembered = () => readText("key") !== null;
