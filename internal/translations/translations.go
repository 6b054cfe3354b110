// Package translations keeps kubectl's translations from being unpacked at the start of every program that has kubectl
// built in: packages of kubectl's ask for words while they are initialised, and the first who does waits 25 ms for them.
//
// It comes in time because of what it imports. Go initialises packages in the order of their paths, each when all that it
// imports has been; kubectl's commands wait for packages from sigs.k8s.io, and this one does not. Its test sees that so.
package translations

import (
	"os"

	"k8s.io/kubectl/pkg/util/i18n"
)

func init() {
	if len(os.Args) > 1 && os.Args[1] == "kubectl" {
		return // somebody will read them
	}
	// It fails only if they have been loaded, and then there is nothing to save.
	_ = i18n.SetLoadTranslationsFunc(func() error { spared = true; return nil })
}

var spared bool

// Spared says whether somebody has asked for words and was not kept waiting.
func Spared() bool { return spared }
