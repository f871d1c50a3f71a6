package main

import (
	_ "embed"
	"errors"
	"fmt"

	"github.com/siderolabs/talos/pkg/machinery/config/configloader"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// document is what the operator adds to the machine configuration of the control plane. The expectations know what its rules do.
//
//go:embed document.yaml
var document []byte

// What the rules of the document set.
const (
	labelCapacity = "example.org/capacity"
	taintSpot     = "example.org/spot"
)

var errNoDocument = errors.New("not an ExtensionServiceConfig document")

// service is an extension service's part of the machine configuration.
type service struct {
	name string
	spec runtime.ExtensionServiceConfigSpec
}

// readDocument reads the document as Talos does.
func readDocument() (service, error) {
	loaded, err := configloader.NewFromBytes(document)
	if err != nil {
		return service{}, fmt.Errorf("read the demo's document: %w", err)
	}

	documents := loaded.ExtensionServiceConfigs()
	if len(documents) != 1 {
		return service{}, fmt.Errorf("read the demo's document: %w", errNoDocument)
	}

	s := service{name: documents[0].Name(), spec: runtime.ExtensionServiceConfigSpec{Environment: documents[0].Environment()}}

	for _, file := range documents[0].ConfigFiles() {
		s.spec.Files = append(s.spec.Files, runtime.ExtensionServiceConfigFile{Content: file.Content(), MountPath: file.MountPath()})
	}

	return s, nil
}
