for (const form of document.querySelectorAll("form.sliders")) {
  const model = JSON.parse(form.dataset.model);
  const short = number => number >= 1e12 ? (number / 1e12).toPrecision(3) + "T" : number >= 1e9 ? (number / 1e9).toPrecision(3) + "B"
    : number >= 1e6 ? (number / 1e6).toPrecision(3) + "M" : Math.round(number).toLocaleString("en");
  const update = () => {
    const value = {};
    for (const input of form.querySelectorAll("input")) {
      value[input.name] = "log" in input.dataset ? 10 ** input.value : Number(input.value);
      input.nextElementSibling.textContent = input.name === "mfu" ? Math.round(100 * value.mfu) + "%" : input.name === "price" ? value.price : short(value[input.name]);
    }
    const times = value.parameters / model.parameters;
    const matrices = 6 * model.matmul * times;
    const attention = length => model.attention * times ** (2 / 3) * (length + 1) / 2;
    const flops = value.tokens * (matrices + attention(value.context));
    const hours = flops / (model.peak * value.mfu) / 3600;
    const results = {
      flops: flops.toExponential(3), hours: short(hours), cost: short(hours * value.price),
      attention: (100 * attention(value.context) / (matrices + attention(value.context))).toFixed(1) + "%",
      saved: (100 * (1 - (matrices + attention(512)) / (matrices + attention(value.context)))).toFixed(1) + "%",
    };
    for (const place of form.querySelectorAll("[data-result]")) place.textContent = results[place.dataset.result];
  };
  form.addEventListener("input", update);
  update();
}
