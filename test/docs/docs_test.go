package docs_test

import (
	"testing"

	"github.com/talos-ccm/talos-ccm/test/docs"
)

// root is the directory of the repository.
const root = "../.."

func TestDocuments(t *testing.T) {
	pages, err := docs.Pages(root)
	if err != nil {
		t.Fatal(err)
	}

	checker := docs.Checker{Root: root, Binary: built, Given: map[string]string{"machine.yaml": "pkg/preview/testdata/talos-v1.13.5.yaml"}}

	report, err := checker.Check(t.Context(), pages...)
	if err != nil {
		t.Fatal(err)
	}

	for _, problem := range report.Problems {
		t.Error(problem)
	}

	t.Log(report)
}
