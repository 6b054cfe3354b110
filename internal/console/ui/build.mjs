// Builds dist from src: one script and one style sheet, with a hash of their content in their names, the page that loads them,
// and the licences of what is in them. The same sources and lock file give the same bytes.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { mkdir, readFile, rm, writeFile } from "node:fs/promises";

const out = process.argv[2] ?? "dist";
const result = await build({
  entryPoints: ["src/main.tsx"],
  bundle: true,
  minify: true,
  write: false,
  outdir: "out",
  format: "iife",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "utf8",
  logLevel: "warning",
});
await rm(out, { recursive: true, force: true });
await mkdir(`${out}/assets`, { recursive: true });
const names = {};
for (const file of result.outputFiles) {
  const kind = file.path.endsWith(".css") ? "css" : "js";
  const hash = createHash("sha256").update(file.contents).digest("hex").slice(0, 12);
  names[kind] = `assets/console-${hash}.${kind}`;
  await writeFile(`${out}/${names[kind]}`, file.contents);
}
const page = await readFile("src/index.html", "utf8");
await writeFile(`${out}/index.html`, page.replace("SCRIPT", names.js).replace("STYLE", names.css));
await writeFile(`${out}/icon.svg`, await readFile("src/icon.svg"));
let licences = "The console's script has parts of these.\n";
for (const name of ["js-yaml", "preact", "uplot"]) {
  const { version } = JSON.parse(await readFile(`node_modules/${name}/package.json`, "utf8"));
  licences += `\n${name} ${version}\n\n${(await readFile(`node_modules/${name}/LICENSE`, "utf8")).trim()}\n`;
}
await writeFile(`${out}/licences.txt`, licences);
