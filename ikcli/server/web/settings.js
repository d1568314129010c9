// The settings dialog, from one table of fields. An empty field is not sent, so the server's default applies.

import { byId, h, icon } from "./dom.js";
import { keyRemembered, readKey, readSettings, writeKey, writeSettings } from "./store.js";

const number = (name, label, help, step, min, max) => ({ name, label, help, kind: "number", step, min, max });

const GROUPS = [
  { title: "Conversation", open: true, fields: [
    { name: "system", label: "System prompt of new conversations", kind: "area", local: true },
    number("max_tokens", "Most tokens per answer", "-1: no limit", 1, -1),
    number("reasoning_budget_tokens", "Most tokens of reasoning", "-1: no limit", 1, -1),
    { name: "reasoning", label: "Reasoning", kind: "select", local: true,
      options: [["", "As the model does"], ["on", "On"], ["off", "Off"], ["low", "On, low effort"], ["medium", "On, medium effort"],
        ["high", "On, high effort"]] },
  ] },
  { title: "Sampling", open: true, fields: [
    number("temperature", "Temperature", "0: no randomness", 0.05, 0),
    number("top_k", "Top K", "0: all tokens", 1, 0),
    number("top_p", "Top P", "1: off", 0.01, 0, 1),
    number("min_p", "Min P", "0: off", 0.01, 0, 1),
    number("typical_p", "Typical P", "1: off", 0.01, 0, 1),
    number("seed", "Seed", "-1: random", 1, -1),
  ] },
  { title: "Penalties", fields: [
    number("repeat_penalty", "Repeat penalty", "1: off", 0.01, 0),
    number("repeat_last_n", "Tokens looked back at", "-1: whole context", 1, -1),
    number("presence_penalty", "Presence penalty", "0: off", 0.05),
    number("frequency_penalty", "Frequency penalty", "0: off", 0.05),
    number("dry_multiplier", "DRY multiplier", "0: off", 0.05, 0),
    number("dry_base", "DRY base", "", 0.05, 1),
    number("dry_allowed_length", "DRY allowed length", "", 1, 0),
  ] },
  { title: "More", fields: [
    number("top_n_sigma", "Top N sigma", "below 0: off", 0.1),
    number("xtc_probability", "XTC probability", "0: off", 0.05, 0, 1),
    number("xtc_threshold", "XTC threshold", "above 0.5: off", 0.05, 0, 1),
    number("dynatemp_range", "Dynamic temperature range", "0: off", 0.05, 0),
    { name: "samplers", label: "Samplers in order", help: "names with ; between them", kind: "text" },
    { name: "stop", label: "Stop texts", help: "one per line", kind: "area" },
    { name: "extra", label: "More request fields", help: "a JSON object: tools, grammar, logit_bias …", kind: "area", local: true },
  ] },
];
const FIELDS = GROUPS.flatMap((group) => group.fields);

// Return the request fields for these settings.
export function requestFields(settings) {
  const out = {};
  for (const { name, kind, local } of FIELDS) {
    const value = settings[name];
    if (local || value === undefined || value === "") continue;
    if (name === "stop") out.stop = value.split("\n").filter((line) => line);
    else out[name] = kind === "number" ? Number(value) : value;
  }
  const reasoning = settings.reasoning || "";
  const extra = settings.extra ? JSON.parse(settings.extra) : {};
  if (reasoning === "on" || reasoning === "off") {
    extra.chat_template_kwargs = { enable_thinking: reasoning === "on", ...extra.chat_template_kwargs };
  } else if (reasoning) out.reasoning_effort = reasoning;
  return { ...out, ...extra };
}

function problem(field, value) {
  if (value === "") return "";
  if (field.kind === "number") {
    const n = Number(value);
    if (!Number.isFinite(n) || (field.step === 1 && !Number.isInteger(n))) return `${field.label}: not a number of the right kind.`;
    if (field.min !== undefined && n < field.min) return `${field.label}: at least ${field.min}.`;
    if (field.max !== undefined && n > field.max) return `${field.label}: at most ${field.max}.`;
  }
  if (field.name === "extra") {
    try {
      const data = JSON.parse(value);
      if (!data || typeof data !== "object" || Array.isArray(data)) return `${field.label}: a JSON object is needed.`;
    } catch (error) {
      return `${field.label}: ${error.message}`;
    }
  }
  return "";
}

function shown(name, value) {
  if (name === "seed" && value === 2 ** 32 - 1) return "-1"; // how servers write a random seed
  return String(Number.isInteger(value) ? value : Number(value.toPrecision(6)));
}

// Build the dialog; `onSave` is called after changes. `defaults()` are the server's settings, `preset()` those it gives
// to the page: an empty field is saved only if it overrides one of these.
export class SettingsDialog {
  constructor(defaults, preset, onSave) {
    this.defaults = defaults;
    this.preset = preset;
    this.onSave = onSave;
    this.dialog = byId("settings");
    this.inputs = new Map();
    byId("settings-close").append(icon("close"));
    byId("settings-fields").append(this.accessGroup(), ...GROUPS.map((group) => this.group(group)));
    for (const id of ["settings-close", "settings-cancel"]) byId(id).addEventListener("click", () => this.dialog.close());
    byId("settings-reset").addEventListener("click", () => this.fill({}));
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
  }

  accessGroup() {
    this.key = h("input", { type: "password", id: "set-key", autocomplete: "off", spellcheck: "false" });
    this.remember = h("input", { type: "checkbox", id: "set-remember" });
    return h("details", { open: true }, h("summary", {}, "Access"), h("div", { class: "fields" },
      h("div", { class: "wide-field" }, h("label", { for: "set-key" }, "API key"), this.key),
      h("label", { class: "check", for: "set-remember" }, this.remember, "Remember the key in this browser")));
  }

  group({ title, open, fields }) {
    return h("details", { open }, h("summary", {}, title), h("div", { class: "fields" }, ...fields.map((field) => this.field(field))));
  }

  field(field) {
    const id = `set-${field.name}`;
    const help = field.help ? h("small", { id: `${id}-help` }, field.help) : null;
    const common = { id, "aria-describedby": help ? `${id}-help` : null };
    let input;
    if (field.kind === "select") input = h("select", common, ...field.options.map(([value, text]) => h("option", { value }, text)));
    else if (field.kind === "area") input = h("textarea", { ...common, rows: 3, spellcheck: "false" });
    else input = h("input", { ...common, type: "text", inputmode: field.kind === "number" ? "decimal" : null, autocomplete: "off" });
    this.inputs.set(field.name, input);
    return h("div", { class: field.kind === "number" ? "" : "wide-field" }, h("label", { for: id }, field.label), input, help);
  }

  open(focus = null) {
    this.fill(readSettings());
    this.key.value = readKey();
    this.remember.checked = keyRemembered();
    this.dialog.showModal();
    if (focus) byId(focus).focus();
  }

  fill(settings) {
    const [defaults, preset] = [this.defaults(), this.preset()];
    for (const { name, kind } of FIELDS) {
      const input = this.inputs.get(name);
      input.value = settings[name] ?? preset[name] ?? "";
      const value = defaults[name];
      if (kind === "number" && Number.isFinite(value)) input.placeholder = shown(name, value);
      if (name === "samplers" && Array.isArray(value)) input.placeholder = value.join(";");
    }
    byId("settings-error").hidden = true;
  }

  save() {
    const [settings, preset] = [{}, this.preset()];
    for (const field of FIELDS) {
      const input = this.inputs.get(field.name);
      const value = field.kind === "area" ? input.value : input.value.trim();
      const wrong = problem(field, value.trim() === "" ? "" : value);
      if (wrong) {
        byId("settings-error").textContent = wrong;
        byId("settings-error").hidden = false;
        input.closest("details").open = true;
        input.focus();
        return;
      }
      if (value.trim() !== String(preset[field.name] ?? "").trim()) settings[field.name] = value.trim() && value;
    }
    writeSettings(settings);
    writeKey(this.key.value.trim(), this.remember.checked);
    this.dialog.close();
    this.onSave();
  }
}
