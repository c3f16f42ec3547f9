// The switch between the light and the dark theme.

"use strict";

const THEME_KEY = "shardrules-theme"; // the script in the head of the page reads it too

function startTheme(changed) {
  const box = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let wish = "auto";
  try { wish = localStorage.getItem(THEME_KEY) ?? "auto"; } catch { /* storage is forbidden */ }
  const apply = () => {
    const dark = wish === "auto" ? system.matches : wish === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    changed();
  };
  for (const input of box.querySelectorAll("input")) {
    input.checked = input.value === wish;
    input.addEventListener("change", () => {
      wish = input.value;
      try {
        if (wish === "auto") localStorage.removeItem(THEME_KEY);
        else localStorage.setItem(THEME_KEY, wish);
      } catch { /* then the choice lasts only as long as the page */ }
      apply();
    });
  }
  system.addEventListener("change", apply);
  box.hidden = false;
}
