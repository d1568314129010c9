// Colours, set before anything is painted: "light", "dark", or as the system says.
"use strict";
(() => {
  let theme = "auto";
  try {
    theme = localStorage.getItem("ik.theme") || "auto";
  } catch {
    // storage is disabled: follow the system
  }
  document.documentElement.dataset.theme = ["light", "dark"].includes(theme) ? theme : "auto";
})();
