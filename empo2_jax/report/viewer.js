"use strict";
const get = id => document.getElementById(id);
const make = (tag, text, name) => {
  const node = document.createElement(tag);
  node.textContent = text;
  if (name) node.className = name;
  return node;
};
const option = (value, text) => { const node = make("option", text); node.value = value; return node; };
const plain = text => text.replace(/\s+/g, " ").trim().toLowerCase();
const points = x => (Math.round(x * 100) / 100).toString();

// Filters of the tables: a row stays while one of its cells has the text.
document.querySelectorAll("input.filter").forEach(input => {
  const table = input.closest(".table"), rows = [...table.querySelectorAll("tbody tr")];
  const texts = rows.map(row => row.textContent.toLowerCase());
  input.addEventListener("input", () => {
    const word = input.value.toLowerCase();
    rows.forEach((row, place) => { row.hidden = !texts[place].includes(word); });
    table.querySelector("[role=status]").textContent = word ? `${rows.filter(row => !row.hidden).length} of ${rows.length} rows` : "";
  });
});

// The episode viewer.
const episodes = JSON.parse(get("data").textContent);
const texts = episodes.map(episode => [
  episode.id, episode.task, episode.goal, episode.tip_written, episode.error,
  ...episode.steps.flatMap(step => [step.observation, step.state_before, step.action, step.resolved, ...step.tips.map(tip => tip.content)]),
].filter(Boolean).map(plain).join("\n"));
const failed = episode => ["env_error", "engine_error"].includes(episode.stop_reason);
const sawTips = episode => episode.steps.some(step => step.tips.length);
const filters = {
  iteration: episode => String(episode.iteration),
  task: episode => episode.task,
  mode: episode => episode.mode,
  outcome: episode => failed(episode) ? "failed" : episode.success ? "solved" : "not solved",
  tips: episode => sawTips(episode) ? "saw tips" : "saw none",
};
const orders = {
  "as played": () => 0,
  "highest score": (a, b) => b.score - a.score,
  "lowest score": (a, b) => a.score - b.score,
  "most novelty": (a, b) => b.intrinsic_return - a.intrinsic_return,
  "most steps": (a, b) => b.steps.length - a.steps.length,
};

function marked(tag, text, name) {
  const node = make(tag, "", name), word = get("search").value.trim().toLowerCase(), lower = text.toLowerCase();
  let place = 0;
  for (let at; word && lower.length === text.length && (at = lower.indexOf(word, place)) >= 0; place = at + word.length) {
    node.append(text.slice(place, at), make("mark", text.slice(at, at + word.length)));
  }
  node.append(text.slice(place));
  return node;
}

function list() {
  const word = plain(get("search").value);
  const places = episodes.map((_, place) => place).filter(place => texts[place].includes(word)
    && Object.entries(filters).every(([id, value]) => !get(id).value || value(episodes[place]) === get(id).value));
  const order = orders[get("order").value];
  places.sort((a, b) => order(episodes[a], episodes[b]) || a - b);
  get("episode").replaceChildren(...places.map(place => {
    const episode = episodes[place];
    return option(place, `${episode.id} · ${episode.task} · ${episode.mode} · score ${points(episode.score)} · ${episode.stop_reason}`);
  }));
  show();
}

function show() {
  const viewer = get("viewer"), picked = get("episode"), episode = episodes[picked.value];
  viewer.replaceChildren();
  get("before").disabled = picked.selectedIndex <= 0;
  get("after").disabled = picked.selectedIndex >= picked.length - 1;
  get("count").textContent = episode ? `Episode ${picked.selectedIndex + 1} of ${picked.length} that match` : "No episode matches.";
  if (!episode) return;
  viewer.append(make("h3", `${episode.task}: ${episode.goal}`));
  viewer.append(make("p", `${episode.id}, ${episode.mode}, score ${points(episode.score)}, return ${points(episode.extrinsic_return)}, novelty ${points(episode.intrinsic_return)}, ended by ${episode.stop_reason}${episode.success ? ", solved" : ""}${episode.error ? ": " + episode.error : ""}, policy version ${episode.policy_version}`, "soft"));
  episode.steps.forEach((step, number) => viewer.append(stepBox(step, number)));
  if (episode.tip_written) viewer.append(make("p", "Tip written after the episode", "soft"), marked("div", episode.tip_written, "tip"));
  if (episode.transcript) {
    const details = make("details", "");
    details.append(make("summary", "Last prompt and answer, word for word"), make("pre", episode.transcript));
    viewer.append(details);
  }
}

function stepBox(step, number) {
  const box = make("div", "", step.resolution === "invalid" ? "step invalid" : "step");
  box.append(make("h3", `Step ${number + 1}`), marked("pre", step.observation));
  if (step.tips.length) box.append(make("p", `Tips seen (${step.tips.length})`, "soft"));
  step.tips.forEach(tip => box.append(marked("div", `${points(tip.score)} · ${tip.content}`, "tip")));
  const sent = step.resolved === step.action ? "" : ` → ${step.resolved}`;
  box.append(marked("p", `▶ ${step.action}${sent}`, "action"));
  box.append(make("p", `${step.resolution}, reward ${points(step.reward)}, novelty ${points(step.intrinsic_reward)}, mean log-prob ${points(step.logprob_mean)} nats, ${step.action_tokens} tokens after ${step.prompt_tokens} (${step.bare_prompt_tokens} without tips)${step.truncated ? ", cut off" : ""}`, "soft"));
  return box;
}

function move(by) {
  get("episode").selectedIndex += by;
  show();
}

function clear() {
  get("search").value = "";
  Object.keys(filters).forEach(id => { get(id).value = ""; });
}

Object.entries(filters).forEach(([id, value]) => {
  const found = new Set(episodes.map(value));
  get(id).append(option("", "all"), ...[...found].map(name => option(name, name)));
  get(id).addEventListener("change", list);
});
Object.keys(orders).forEach(name => get("order").append(option(name, name)));
get("order").addEventListener("change", list);
get("search").addEventListener("input", list);
get("episode").addEventListener("change", show);
get("before").addEventListener("click", () => move(-1));
get("after").addEventListener("click", () => move(1));
get("clear").addEventListener("click", () => { clear(); list(); });
document.querySelectorAll("button.find").forEach(button => button.addEventListener("click", () => {
  clear();
  get("search").value = button.dataset.search;
  list();
  get("episodes").scrollIntoView();
  get("search").focus({ preventScroll: true });
}));
list();
