"""The style sheet and the script of a report's page."""

STYLE = """
:root { --before: #b0563c; --after: #2b6ca3; --ink: #1d2329; --soft: #66707a; --line: #d9dee3; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --before: #e08a6d; --after: #6aaee6; --ink: #e6e9ec; --soft: #98a2ac; --line: #3a424a; --paper: #15191d; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1040px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.25rem; line-height: 1.4; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
h3 { font-size: .9rem; color: var(--soft); margin: .4rem 0; }
code, pre, td:first-child { font-family: ui-monospace, monospace; font-size: .86em; }
dl { display: flex; flex-wrap: wrap; gap: .4rem 2rem; margin: 1rem 0; } dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); } .axis { text-anchor: end; }
.grid { stroke: var(--line); } path.before { fill: var(--before); fill-opacity: .15; stroke: var(--before); }
path.after { fill: var(--after); fill-opacity: .3; stroke: var(--after); }
line.budget { stroke: var(--ink); stroke-dasharray: 6 4; } line.cursor { stroke: var(--soft); }
.legend span { margin-right: 1.5rem; } span.before { color: var(--before); } span.after { color: var(--after); }
rect.compute { fill: var(--after); } rect.wait { fill: #c43c3c; } rect.out { fill: #7a9c4f; } rect.in { fill: #c79a3a; }
.note { color: var(--soft); font-size: .85rem; margin: 0; }
.wide { overflow-x: auto; max-height: 32rem; } .wide svg { width: auto; background: #fff; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--soft); font-weight: 600; position: sticky; top: 0; background: var(--paper); }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.two td:nth-child(2), .moves td:nth-child(2), .moves td:nth-child(3), .moves td:nth-child(6), .moves th {
  white-space: nowrap; } .two .wide { max-height: 19rem; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 2rem; } summary { cursor: pointer; color: var(--soft); }
pre { overflow-x: auto; background: color-mix(in srgb, var(--line) 30%, transparent); padding: 1rem; }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--paper); padding: .3rem .6rem;
  border-radius: 4px; font-size: .82rem; white-space: pre; max-width: 90vw; z-index: 1; }
"""

SCRIPT = """
const tip = document.getElementById("tip");
function show(event, text) {
  tip.textContent = text; tip.hidden = false;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.clientY + 14 + "px";
}
document.querySelectorAll("svg.memory").forEach(svg => {
  const data = DATA[svg.dataset.part], cursor = svg.querySelector(".cursor"), left = 64, width = 1000;
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    const share = (x - left) / (width - left);
    if (share < 0 || share >= 1) return;
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
    const lines = [];
    for (const [key, words] of [["before", "without tfmem"], ["after", "with tfmem"]]) {
      const at = data[key][Math.floor(share * data[key].length)];
      if (at) lines.push(words + ": " + at[1] + " at " + at[0]);
    }
    show(event, lines.join("\\n"));
  });
  svg.addEventListener("mouseleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
});
document.querySelectorAll("[data-tip]").forEach(mark => {
  mark.addEventListener("mousemove", event => show(event, mark.dataset.tip));
  mark.addEventListener("mouseleave", () => { tip.hidden = true; });
});
document.body.dataset.ready = "yes";
"""
