// Measures the pages of the site in frames of several widths, in both colour schemes.
// `PAGES`, `WIDTHS` and `QUERY` are set before this script; it posts a JSON report.

const THEMES = ["default", "slate"];
const MIN_TEXT = 4.5, MIN_BAR = 3;

function colour(text) {
  const n = text.match(/-?[\d.]+(e-?\d+)?/g).map(Number);
  const [r, g, b] = text.startsWith("color(") ? n.map((x) => x * 255) : n;
  return { r, g, b, a: n[3] ?? 1 };
}
function over(top, below) {
  const mix = (k) => top[k] * top.a + below[k] * (1 - top.a);
  return { r: mix("r"), g: mix("g"), b: mix("b"), a: 1 };
}
function luminance(c) {
  const [r, g, b] = [c.r, c.g, c.b]
    .map((x) => x / 255)
    .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function background(element) {
  if (!element) return { r: 255, g: 255, b: 255, a: 1 };
  const own = colour(getComputedStyle(element).backgroundColor);
  return own.a === 1 ? own : over(own, background(element.parentElement));
}
function isVisible(element) {
  const box = element.getBoundingClientRect();
  return box.width > 1 && box.height > 1 && element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
}
function describe(element) {
  return `${element.tagName.toLowerCase()}.${element.className} "${element.textContent.trim().slice(0, 30)}"`;
}

function overflows(doc) {
  const found = [];
  const root = doc.documentElement;
  if (root.scrollWidth > root.clientWidth) found.push(`the page is ${root.scrollWidth} px wide`);
  const column = doc.querySelector(".md-content");
  const right = column.getBoundingClientRect().right + 1;
  for (const element of column.querySelectorAll("*")) {
    if (!isVisible(element) || element.getBoundingClientRect().right <= right) continue;
    let at = element.parentElement;
    while (at !== column && getComputedStyle(at).overflowX === "visible") at = at.parentElement;
    if (at === column) found.push(`${describe(element)} leaves the column`);
  }
  return found;
}
function faintTexts(doc) {
  const found = new Set();
  const walker = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || seen.has(element)) continue;
    seen.add(element);
    if (element.closest("script, style, noscript, [data-md-component=search]") || !isVisible(element)) continue;
    const ground = background(element);
    const ratio = contrast(over(colour(getComputedStyle(element).color), ground), ground);
    if (ratio < MIN_TEXT) found.add(`${describe(element)} has a contrast of ${ratio.toFixed(2)}`);
  }
  return [...found];
}
async function faintMarks(doc) {
  const found = [];
  for (const image of doc.querySelectorAll('article img[src*="#only-"]')) {
    if (!isVisible(image)) continue;
    const text = await (await fetch(image.src)).text();
    const svg = new DOMParser().parseFromString(text, "image/svg+xml");
    const probe = doc.createElement("i");
    doc.body.append(probe);
    for (const [what, tag, least] of [["bars", "path", MIN_BAR], ["texts", "text", MIN_TEXT]]) {
      const styles = [...svg.querySelectorAll(tag)].map((mark) => mark.getAttribute("style"));
      const fills = new Set(styles.map((style) => style?.match(/fill: (#\w+)/)?.[1]).filter(Boolean));
      for (const fill of fills) {
        probe.style.color = fill;
        const ratio = contrast(colour(getComputedStyle(probe).color), background(image));
        if (ratio < least) found.push(`${image.src}: ${what} ${fill} have a contrast of ${ratio.toFixed(2)}`);
      }
      if (!fills.size) found.push(`${image.src} has no ${what}`);
    }
    probe.remove();
  }
  return found;
}
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

async function open(path, width) {
  const frame = document.createElement("iframe");
  Object.assign(frame, { width, height: 900, src: path });
  const loaded = new Promise((done) => (frame.onload = done));
  document.body.append(frame);
  await loaded;
  return frame;
}
async function checkPage(page, width) {
  const frame = await open(page, width);
  const doc = frame.contentDocument;
  doc.head.insertAdjacentHTML("beforeend", "<style>* {transition: none !important; animation: none !important}</style>");
  for (let i = 0; i < 50 && doc.querySelector("article table:not([class])") && !doc.querySelector(".md-typeset__scrollwrap"); i++) await sleep(20);
  const problems = [];
  for (const theme of THEMES) {
    doc.body.setAttribute("data-md-color-scheme", theme);
    const found = [...overflows(doc), ...faintTexts(doc), ...(await faintMarks(doc))];
    problems.push(...found.map((what) => `${page} at ${width} px, ${theme}: ${what}`));
  }
  frame.remove();
  return problems;
}
async function firstHit() {
  const frame = await open(`/index.html?q=${encodeURIComponent(QUERY)}`, 1366);
  for (let i = 0; i < 300; i++) {
    const link = frame.contentDocument.querySelector(".md-search-result__item a");
    if (link) return `${new URL(link.href).pathname}${new URL(link.href).hash} ${link.textContent}`;
    await sleep(100);
  }
  return "no result";
}
async function main() {
  const problems = [];
  for (const page of PAGES) for (const width of WIDTHS) problems.push(...(await checkPage(page, width)));
  return { problems, firstHit: await firstHit() };
}
main()
  .catch((error) => ({ problems: [`the check failed: ${error} ${error.stack}`], firstHit: "" }))
  .then((report) => fetch("/report", { method: "POST", body: JSON.stringify(report) }));
