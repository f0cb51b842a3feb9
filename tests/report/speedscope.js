// Opens a trace in speedscope in a headless Chromium, and writes what speedscope imported by its own Export button.
// node speedscope.js NODE_MODULES CHROMIUM TRACE OUT_FOLDER: imported.json, picture.png; what it complains of on stderr.
const fs = require("fs"), http = require("http"), path = require("path");
const [modules, chromium, trace, out] = process.argv.slice(2);
const puppeteer = require(path.join(modules, "puppeteer-core"));
const release = path.join(modules, "speedscope/dist/release");
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json" };

function answer(request, response) {
  const name = decodeURIComponent(request.url.split("?")[0]);
  const file = name === "/trace.json" ? trace : path.join(release, path.normalize(name));
  if (!fs.existsSync(file)) return response.writeHead(404).end();
  response.writeHead(200, { "content-type": TYPES[path.extname(file)] || "application/octet-stream" });
  response.end(fs.readFileSync(file));
}

async function main() {
  const server = http.createServer(answer);
  await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
  const site = `http://127.0.0.1:${server.address().port}`;
  const browser = await puppeteer.launch({ executablePath: chromium, args: ["--no-sandbox"] });
  try {
    const page = await browser.newPage();
    page.on("pageerror", (error) => console.error(`page error: ${error.message}`));
    page.on("console", (message) => message.text().startsWith("[") || console.log(message.text()));
    page.on("console", (message) => message.type() === "error" && console.error(message.text()));
    await page.setViewport({ width: 1400, height: 700 });
    const session = await browser.target().createCDPSession();
    await session.send("Browser.setDownloadBehavior", { behavior: "allow", downloadPath: out, eventsEnabled: true });
    const saved = new Promise((done) =>
      session.on("Browser.downloadProgress", (event) => event.state === "completed" && done()));
    await page.goto(`${site}/index.html#profileURL=${encodeURIComponent(`${site}/trace.json`)}`);
    await page.waitForFunction("document.title.startsWith('trace.json')", { timeout: 60000 });
    await page.screenshot({ path: path.join(out, "picture.png") });
    await page.evaluate(() => {
      const buttons = [...document.querySelectorAll("div")].filter((one) => /Export$/.test(one.innerText.trim()));
      buttons.at(-1).click();
    });
    await saved;
    fs.renameSync(path.join(out, "trace.speedscope.json"), path.join(out, "imported.json"));
  } finally {
    await browser.close();
    server.close();
  }
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
