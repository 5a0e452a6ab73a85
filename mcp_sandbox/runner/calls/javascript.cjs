// Loaded before code that Node will read from its standard input as an ES module. What can run as
// CommonJS is taken from there and run as that; ES modules get `require` and the like as globals.
const fs = require('fs')
const Module = require('module')
const main = process.mainModule = new Module('.')
main.filename = require('path').resolve('[eval1]')
main.paths = Module._nodeModulePaths(process.cwd())
// Programs that are started from here would take our options too.
process.execArgv = []
const given = {
  exports: main.exports, require: Module.createRequire(main.filename), module: main,
  __filename: main.filename, __dirname: process.cwd()
}

function takeCommonJs () {
  const code = Buffer.alloc(fs.fstatSync(0).size)
  // From a position: Node still finds it all.
  fs.readSync(0, code, 0, code.length, 0)
  try {
    require('vm').compileFunction(code.toString(), Object.keys(given))
  } catch {
    // An ES module, or an error that Node will show.
    return ''
  }
  return fs.readFileSync(0, 'utf8')
}

const code = require('worker_threads').isMainThread ? takeCommonJs() : ''
if (code) setImmediate(() => main._compile(code, main.filename))
else Object.assign(globalThis, given)
