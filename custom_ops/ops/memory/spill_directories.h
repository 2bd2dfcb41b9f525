// The directories that this process's own code named for spill files. Graphs carry keys to them,
// which only this process gives out: what a graph brings names no directory.
#pragma once

#include <optional>
#include <string>

namespace tfmem {

// The key of `directory`: the same each time, in this process; no other can guess it. Empty for
// none, which stands for the system's directory for temporary files.
std::string SpillDirectoryKey(const std::string& directory);

// The directory of a key; nothing for one that this process did not give out.
std::optional<std::string> FindSpillDirectory(const std::string& key);

}  // namespace tfmem
