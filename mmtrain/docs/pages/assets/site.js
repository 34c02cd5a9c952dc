// What the theme lacks for keyboards and screen readers: wide tables that can be scrolled by keys, and names for the buttons
// beside each block of code.
function mend() {
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((wide) => wide.setAttribute("tabindex", "0"));
  document.querySelectorAll("nav.md-code__nav").forEach((buttons, number) => {
    const name = `code ${number + 1}`;
    if (buttons.getAttribute("aria-label") !== name) buttons.setAttribute("aria-label", name);
  });
}
new MutationObserver(mend).observe(document.documentElement, { childList: true, subtree: true });
mend();
