package translations_test

import (
	"testing"

	_ "k8s.io/kubectl/pkg/cmd" // asks for words while it is initialised

	"portal/internal/translations"
)

func TestKubectlComesLater(t *testing.T) {
	if !translations.Spared() {
		t.Error("kubectl's packages are initialised before this one and have loaded their translations, or they no longer do so early and this package is needless")
	}
}
