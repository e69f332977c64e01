// A client of Octavo's public service, for browsers and Node alike: stubs from the protos, fetch below them.

import { createClient, type Client, type Interceptor } from "@connectrpc/connect";
import { createConnectTransport, createGrpcWebTransport } from "@connectrpc/connect-web";
import { InferenceService } from "./gen/octavo/v1/inference_pb.js";

export interface Server {
  /** Of the router's HTTP port, such as http://127.0.0.1:8000. */
  baseUrl: string;
  /** An API key, where the router asks for one. */
  key?: string;
  protocol?: "connect" | "grpc-web";
}

export function connect({ baseUrl, key, protocol = "connect" }: Server): Client<typeof InferenceService> {
  const withKey: Interceptor = (next) => (request) => {
    if (key) request.header.set("authorization", `Bearer ${key}`);
    return next(request);
  };
  const options = { baseUrl, interceptors: [withKey] };
  const transport =
    protocol === "connect"
      ? createConnectTransport({ ...options, useBinaryFormat: true })
      : createGrpcWebTransport(options);
  return createClient(InferenceService, transport);
}

export interface Turn {
  role: string;
  content: string;
}

export interface Wishes {
  model?: string;
  temperature?: number;
  maxTokens?: number;
  /** Aborting it stops the answer, and the work for it on the server. */
  signal?: AbortSignal;
}

/** The answer's text as it comes. Throws ConnectError. */
export async function* chat(
  client: Client<typeof InferenceService>,
  messages: Turn[],
  { model = "", temperature, maxTokens, signal }: Wishes = {},
): AsyncGenerator<string> {
  const request = { model, messages, sampling: { temperature, maxTokens } };
  for await (const { event } of client.chat(request, { signal })) {
    if (event.case === "delta" && event.value.text) yield event.value.text;
  }
}
