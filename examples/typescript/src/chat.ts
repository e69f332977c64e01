// npm run chat -- [--url URL] [--key KEY] [--protocol connect|grpc-web] [--temperature X] [--max-tokens N] WORDS…

import { parseArgs } from "node:util";
import { Code, ConnectError } from "@connectrpc/connect";
import { chat, connect } from "./client.js";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    url: { type: "string", default: "http://127.0.0.1:8000" },
    key: { type: "string", default: process.env["OCTAVO_API_KEY"] ?? "" },
    protocol: { type: "string", default: "connect" },
    temperature: { type: "string", default: "0.2" },
    "max-tokens": { type: "string" },
  },
});

if (values.protocol !== "connect" && values.protocol !== "grpc-web") {
  console.error(`--protocol ${values.protocol}: must be connect or grpc-web`);
  process.exit(2);
}

const stop = new AbortController();
process.on("SIGINT", () => stop.abort());

try {
  const client = connect({ baseUrl: values.url, key: values.key, protocol: values.protocol });
  const wishes = {
    temperature: Number(values.temperature),
    maxTokens: values["max-tokens"] === undefined ? undefined : Number(values["max-tokens"]),
    signal: stop.signal,
  };
  for await (const text of chat(client, [{ role: "user", content: positionals.join(" ") }], wishes)) {
    process.stdout.write(text);
  }
  process.stdout.write("\n");
} catch (error) {
  const { code, rawMessage } = ConnectError.from(error);
  if (code === Code.Canceled) {
    process.stdout.write("\n");
  } else {
    console.error(`${Code[code]}: ${rawMessage}`);
    process.exitCode = 1;
  }
}
