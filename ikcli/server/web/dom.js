// Create elements; text only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  plus: "M12 5v14M5 12h14",
  settings: "M4 8h9M19 8h1M4 16h1M11 16h9M16 5.5v5M8 13.5v5",
  light: "M12 8a4 4 0 100 8 4 4 0 000-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  dark: "M20 14.5A8.5 8.5 0 019.5 4 8.5 8.5 0 1020 14.5z",
  auto: "M12 4a8 8 0 100 16 8 8 0 000-16zM12 4v16M12 8h5.5M12 12h8M12 16h5.5",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM15 9V5H5v11h4",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M5 19h3L19 8l-3-3L5 16zM13.5 7.5l3 3",
  redo: "M19 12a7 7 0 11-2.3-5.2M19 4v4.5h-4.5",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l.8 12.5h8.4L17 7M10.5 10.5v6M13.5 10.5v6",
  down: "M12 5v14M6 13l6 6 6-6",
  save: "M12 4v11M7.5 11l4.5 4.5 4.5-4.5M5 19.5h14",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 2.5-2.5L20 17M15.5 9.5h.01",
};

// Create an element: `on` holds listeners, `data` dataset entries; null and false attributes are skipped.
export function h(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

// Create a button with an icon; the label is its accessible name and its tooltip.
export function iconButton(name, label, listener, more = {}) {
  return h("button", { type: "button", class: "icon", "aria-label": label, title: label, on: { click: listener }, ...more },
    icon(name));
}

export const byId = (id) => document.getElementById(id);

// Copy text. Plain http to another machine has no clipboard API, so fall back on execCommand.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "hidden", "aria-hidden": "true" });
    area.value = text;
    (document.querySelector("dialog[open]") || document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// Create a copy button that confirms with a check mark.
export function copyButton(label, getText) {
  const button = iconButton("copy", label, async () => {
    const done = await copyText(getText());
    button.replaceChildren(icon(done ? "check" : "close"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
  return button;
}

export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
