// Colours, set before anything is painted: "light", "dark", or as the system has it.
"use strict";
(() => {
  let theme = "auto";
  try {
    theme = localStorage.getItem("ik.theme") || "auto";
  } catch {
    // storage is switched off: follow the system
  }
  document.documentElement.dataset.theme = ["light", "dark"].includes(theme) ? theme : "auto";
})();
