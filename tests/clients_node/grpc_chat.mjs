// A client of native gRPC without generated code: reads the protos, streams one chat, prints a JSON line for each event.
// node grpc_chat.mjs PROTOS_DIRECTORY ADDRESS REQUEST_JSON KEY MOST_EVENTS; cancels after MOST_EVENTS, 0 for never.

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [directory, address, request, key, mostEvents] = process.argv.slice(2);
const definition = protoLoader.loadSync("octavo/v1/inference.proto", {
  includeDirs: [directory],
  defaults: true,
  oneofs: true,
  enums: String,
  longs: String,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).octavo.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure(), {
  "grpc.keepalive_time_ms": 10_000,
});
const metadata = new grpc.Metadata();
if (key) metadata.set("authorization", `Bearer ${key}`);

let numEvents = 0;
const call = client.Chat(JSON.parse(request), metadata, { deadline: Date.now() + 60_000 });
call.on("data", (response) => {
  console.log(JSON.stringify(response));
  numEvents += 1;
  if (numEvents === Number(mostEvents)) call.cancel();
});
call.on("error", () => {});
call.on("status", ({ code, details, metadata: trailers }) => {
  const [packed] = trailers.get("grpc-status-details-bin");
  console.log(JSON.stringify({ status: { code, details, packed: packed?.toString("base64") ?? "" } }));
  client.close();
});
