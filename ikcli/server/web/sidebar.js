// The list of conversations, and the dialog that asks for a name or a confirmation.

import { byId, h, iconButton } from "./dom.js";
import { titleOf } from "./tree.js";

// Ask; resolve to the text (or true), or to null if the user declines.
export function ask({ title, text = "", value = null, yes = "OK", danger = false }) {
  const dialog = byId("ask");
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-text").hidden = !text;
  byId("ask-field").hidden = value === null;
  byId("ask-input").value = value ?? "";
  byId("ask-yes").textContent = yes;
  byId("ask-yes").classList.toggle("danger", danger);
  return new Promise((resolve) => {
    let answer = null;
    const submit = (event) => {
      event.preventDefault();
      answer = value === null ? true : byId("ask-input").value.trim();
      dialog.close();
    };
    const cancel = () => dialog.close();
    byId("ask-form").addEventListener("submit", submit);
    byId("ask-no").addEventListener("click", cancel);
    dialog.addEventListener("close", () => {
      byId("ask-form").removeEventListener("submit", submit);
      byId("ask-no").removeEventListener("click", cancel);
      resolve(answer);
    }, { once: true });
    dialog.showModal();
    if (value === null) byId("ask-no").focus();
    else byId("ask-input").select();
  });
}

// Fill the list; `actions` opens, renames, exports and deletes.
export function showList(conversations, current, running, actions) {
  const items = [...conversations].sort((a, b) => b.updated - a.updated).map((item) => {
    const title = titleOf(item);
    const open = h("button", { type: "button", class: "open", title, "aria-current": item === current ? "true" : null,
      on: { click: () => actions.open(item) } }, title);
    return h("li", { class: item === current ? "current" : null, data: { id: item.id } }, open,
      running.has(item.id) ? h("span", { class: "dot", role: "img", "aria-label": "answering" }) : null,
      h("span", { class: "tools" },
        iconButton("edit", `Rename “${title}”`, () => actions.rename(item)),
        iconButton("save", `Export “${title}”`, () => actions.exportOne(item)),
        iconButton("trash", `Delete “${title}”`, () => actions.remove(item))));
  });
  const list = byId("conversations");
  const focused = document.activeElement?.closest("#conversations li");
  const place = focused ? [...focused.querySelectorAll("button")].indexOf(document.activeElement) : -1;
  list.replaceChildren(...items);
  if (focused) items.find((item) => item.dataset.id === focused.dataset.id)?.querySelectorAll("button")[place]?.focus();
}
