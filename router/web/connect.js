// The Connect protocol with JSON, as far as a page needs it: unary calls and server streams of one service.
// Knows HTTP and frames; knows no method and no message.

const SERVICE = "octavo.v1.InferenceService/";
const COMPRESSED = 1;
const END = 2;
const HEAD_BYTES = 5;

/** What a call ended with; `code` is Connect's, such as "invalid_argument". */
export class CallError extends Error {
  constructor(code, message) {
    super(message || code);
    this.code = code;
  }
}

/** The answer of a unary method. Throws CallError. */
export async function call(method, request, { key, signal } = {}) {
  const response = await post(method, "application/json", JSON.stringify(request), key, signal);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** The messages of a streaming method. Throws CallError when the stream ends with an error, or without an end. */
export async function* stream(method, request, { key, signal } = {}) {
  const response = await post(method, "application/connect+json", frame(request), key, signal);
  if (!response.ok) throw await refusal(response);
  for await (const [flags, text] of frames(response.body)) {
    if (flags & COMPRESSED) throw new CallError("internal", "the answer is compressed, which was not asked for");
    const message = JSON.parse(text);
    if (!(flags & END)) {
      yield message;
      continue;
    }
    if (message.error) throw new CallError(message.error.code, message.error.message);
    return;
  }
  throw new CallError("unavailable", "the connection was lost before the answer ended");
}

async function post(method, type, body, key, signal) {
  const headers = { "content-type": type, "connect-protocol-version": "1" };
  if (key) headers.authorization = `Bearer ${key}`;
  try {
    return await fetch(address(method), { method: "POST", headers, body, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError("unavailable", "the server cannot be reached");
  }
}

/** Beside the page, which a proxy may have put below a path; without the name and password its address may hold. */
function address(method) {
  const url = new URL(SERVICE + method, document.baseURI);
  url.username = url.password = "";
  return url;
}

async function refusal(response) {
  try {
    const { code, message } = await response.json();
    if (code) return new CallError(code, message);
  } catch {
    // No body of Connect's: a proxy between has answered.
  }
  return new CallError("unknown", `the server answered with HTTP status ${response.status}`);
}

function frame(message) {
  const body = new TextEncoder().encode(JSON.stringify(message));
  const framed = new Uint8Array(HEAD_BYTES + body.length);
  new DataView(framed.buffer).setUint32(1, body.length);
  framed.set(body, HEAD_BYTES);
  return framed;
}

/** Pairs of flags and text, as whole frames come in. */
async function* frames(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = new Uint8Array();
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      rest = joined(rest, value);
      while (rest.length >= HEAD_BYTES) {
        const length = new DataView(rest.buffer, rest.byteOffset).getUint32(1);
        if (rest.length < HEAD_BYTES + length) break;
        const text = decoder.decode(rest.subarray(HEAD_BYTES, HEAD_BYTES + length));
        const flags = rest[0];
        rest = rest.subarray(HEAD_BYTES + length);
        yield [flags, text];
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new CallError("unavailable", "the connection was lost before the answer ended");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

function joined(first, second) {
  if (!first.length) return second;
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}
