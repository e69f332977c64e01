// The chat page: one conversation, kept in this tab. What a model says is put into the page as text, never as markup.

import { CallError, call, stream } from "./connect.js";
import { Counters } from "./counters.js";

const MOST_SCROLL_GAP_PX = 40;
const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));
const settings = page.settings.elements;

let conversation = stored("conversation", []);
let running = null;

// Storage ------------------------------------------------------------------------------------------------------------

function stored(name, otherwise) {
  const text = sessionStorage.getItem(`octavo.${name}`);
  return text === null ? otherwise : JSON.parse(text);
}

function store(name, value) {
  sessionStorage.setItem(`octavo.${name}`, JSON.stringify(value));
}

function storeSettings() {
  store("settings", { ...Object.fromEntries(new FormData(page.settings)), model: page.model.value });
}

// Messages on the page -----------------------------------------------------------------------------------------------

function show({ role, content, reasoning }) {
  const message = document.createElement("div");
  message.className = `message ${role}`;
  const text = document.createElement("div");
  text.className = "text";
  text.append(content);
  message.append(text);
  if (reasoning) think(message, reasoning);
  page.log.append(message);
  page.log.scrollTop = page.log.scrollHeight;
  return message;
}

function think(message, more) {
  let details = message.querySelector("details");
  if (!details) {
    details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.append("Thinking");
    details.append(summary, "");
    message.prepend(details);
  }
  details.lastChild.appendData(more);
}

function say(message, more) {
  const follows = page.log.scrollHeight - page.log.scrollTop - page.log.clientHeight < MOST_SCROLL_GAP_PX;
  const text = message.querySelector(".text");
  if (text.lastChild) text.lastChild.appendData(more);
  else text.append(more);
  if (follows) page.log.scrollTop = page.log.scrollHeight;
}

function complain(error) {
  page.error.hidden = !error;
  page.error.textContent = error ? error.message : "";
  if (error?.code === "unauthenticated") settings.key.focus();
}

// One answer ---------------------------------------------------------------------------------------------------------

function requestOf(messages) {
  const number = (name) => (settings[name].value === "" ? undefined : Number(settings[name].value));
  const system = settings.system.value.trim();
  return {
    model: page.model.value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    sampling: { temperature: number("temperature"), topP: number("topP"), maxTokens: number("maxTokens") },
  };
}

async function ask(text) {
  complain(null);
  const question = { role: "user", content: text };
  const answer = { role: "assistant", content: "", reasoning: "" };
  const shownQuestion = show(question);
  const shownAnswer = show(answer);
  const aborter = new AbortController();
  const mine = conversation;
  setRunning(aborter, shownAnswer);
  try {
    await receive([...conversation, question], answer, shownAnswer, aborter.signal);
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
  }
  setRunning(null, shownAnswer);
  if (conversation !== mine) return; // a new one was begun meanwhile
  if (answer.content || answer.reasoning) {
    conversation.push(question, answer);
    store("conversation", conversation);
  } else {
    // Nothing came of it: the question goes back to where it can be asked again.
    shownQuestion.remove();
    shownAnswer.remove();
    if (!page.input.value) page.input.value = text;
  }
}

async function receive(messages, answer, shown, signal) {
  const counters = new Counters(performance.now());
  count(counters);
  const request = requestOf(messages.map(({ role, content }) => ({ role, content })));
  for await (const event of stream("Chat", request, { key: settings.key.value, signal })) {
    const { delta, usage } = event;
    if (delta) {
      counters.add(delta.tokenIds?.length ?? 0, performance.now());
      if (delta.reasoning) {
        answer.reasoning += delta.reasoning;
        think(shown, delta.reasoning);
      }
      if (delta.text) {
        answer.content += delta.text;
        say(shown, delta.text);
      }
    }
    count(counters, usage);
  }
}

function count(counters, usage) {
  const speed = counters.tokensPerSecond;
  const first = counters.firstTokenMs;
  page.tokens.value = `${usage?.completionTokens ?? counters.numTokens} tokens`;
  page.speed.value = speed === null ? "" : `${speed.toFixed(1)} tokens/s`;
  page.first.value = first === null ? "" : `first token after ${first.toFixed(0)} ms`;
  page.prompt.value = usage ? `prompt ${usage.promptTokens} tokens, ${usage.cachedTokens ?? 0} cached` : "";
}

function setRunning(aborter, message) {
  running = aborter;
  message.classList.toggle("running", aborter !== null);
  page.send.hidden = aborter !== null;
  page.stop.hidden = aborter === null;
}

// What a person does -------------------------------------------------------------------------------------------------

page.ask.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = page.input.value;
  if (running || !text.trim()) return;
  if (!page.settings.reportValidity()) return;
  page.input.value = "";
  ask(text);
});

page.input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  page.ask.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

page.stop.addEventListener("click", () => {
  running?.abort();
  page.input.focus();
});

page.new.addEventListener("click", () => {
  running?.abort();
  conversation = [];
  store("conversation", conversation);
  page.log.replaceChildren();
  complain(null);
  page.input.focus();
});

page.settings.addEventListener("submit", (event) => event.preventDefault());
page.settings.addEventListener("input", () => {
  storeSettings();
  dress();
});
page.model.addEventListener("change", storeSettings);
settings.key.addEventListener("change", listModels);

// Start --------------------------------------------------------------------------------------------------------------

function dress() {
  document.documentElement.dataset.theme = settings.theme.value;
}

async function listModels() {
  const wanted = page.model.value || stored("settings", {}).model;
  try {
    const { models = [] } = await call("ListModels", {}, { key: settings.key.value });
    page.model.replaceChildren(...models.map(({ name }) => new Option(name, name, false, name === wanted)));
    complain(models.length ? null : new CallError("unavailable", "no model is served yet; reload in a moment"));
  } catch (error) {
    complain(error);
  }
}

for (const [name, value] of Object.entries(stored("settings", {}))) {
  if (settings[name]) settings[name].value = value;
}
dress();
conversation.forEach(show);
listModels();
