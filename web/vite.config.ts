/**
 * The build: relative URLs, so that the page works under any root path; every asset in assets/
 * under a name with its hash; beside each file a gzip and a brotli copy.
 */
import { brotliCompressSync, constants, gzipSync } from "node:zlib";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";

const SERVER = process.env["STREAMER_URL"] ?? "http://127.0.0.1:8000";
const TEXT = /\.(html|js|css|svg|json)$/;

/** Without it the system's theme shows for a moment before the chosen one. */
function paintOnce(): Plugin {
  return {
    name: "paint-once",
    transformIndexHtml: (html) => html.replace('<script type="module"', '<script type="module" blocking="render"'),
  };
}

function compress(): Plugin {
  let folder = "";
  return {
    name: "compress",
    apply: "build",
    configResolved: (config) => void (folder = config.build.outDir),
    closeBundle() {
      for (const name of readdirSync(folder, { recursive: true, encoding: "utf8" })) {
        if (!TEXT.test(name)) continue;
        const path = join(folder, name);
        const data = readFileSync(path);
        writeFileSync(`${path}.gz`, gzipSync(data, { level: 9 }));
        writeFileSync(`${path}.br`, brotliCompressSync(data, { params: { [constants.BROTLI_PARAM_SIZE_HINT]: data.length } }));
      }
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [paintOnce(), compress()],
  build: {
    target: "es2022",
    cssTarget: ["chrome123", "firefox120", "safari17.5"], // light-dark()
    modulePreload: { polyfill: false },
    assetsInlineLimit: (path) => path.endsWith(".svg"), // small ones, as data: URLs
    reportCompressedSize: false,
  },
  server: {
    proxy: Object.fromEntries(
      ["/v1", "/health", "/ready", "/metrics", "/tokenize", "/detokenize"].map((path) => [
        path,
        { target: SERVER, ws: true, changeOrigin: true, headers: { origin: SERVER } },
      ]),
    ),
  },
  test: {
    include: [process.env["PAGE_TEST_URL"] ? "test/**/*.test.ts" : "test/*.test.ts"],
    environment: "node",
    testTimeout: 30_000,
    fileParallelism: false,
  },
});
