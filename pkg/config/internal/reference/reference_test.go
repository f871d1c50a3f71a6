package main

import (
	"bytes"
	"os"
	"testing"
)

func TestGenerate_FilesAreUpToDate(t *testing.T) {
	t.Chdir("../..")

	generated, err := generate()
	if err != nil {
		t.Fatal(err)
	}

	for name, want := range generated {
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not up to date (%v): run go generate ./pkg/config", name, err)
		}
	}
}
