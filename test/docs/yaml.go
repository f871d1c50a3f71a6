package docs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	talosconfig "github.com/siderolabs/talos/pkg/machinery/config/config"
	"github.com/siderolabs/talos/pkg/machinery/config/configloader"
	"github.com/siderolabs/talos/pkg/machinery/config/types/runtime/extensions"
	"github.com/siderolabs/talos/pkg/machinery/config/types/v1alpha1"
	"go.yaml.in/yaml/v4"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// yaml checks a block of YAML documents by their types. The purpose gives the type where a document does not: config is a configuration file, wrong is an
// invalid one, document is machine configuration, and the tests of package config compare machine and node.
func (r *reading) yaml(b block) {
	var err error

	switch b.purpose {
	case "":
		err = r.documents([]byte(b.text))
	case "config":
		_, err = config.Parse("block", []byte(b.text))
	case "wrong":
		if _, parsed := config.Parse("block", []byte(b.text)); parsed == nil {
			err = errors.New("a configuration that is marked as wrong is valid")
		}
	case "document":
		err = r.machineConfig([]byte(b.text))
	case "machine", "node":
		err = wellFormed([]byte(b.text))
	default:
		err = fmt.Errorf("unknown purpose %q of YAML", b.purpose)
	}

	if err != nil {
		r.problem(b.line, "%v", err)
	}
}

func wellFormed(text []byte) error {
	var mapping map[string]any

	return yaml.Unmarshal(text, &mapping)
}

// documents checks a stream of documents.
func (r *reading) documents(text []byte) error {
	decoder := yaml.NewDecoder(bytes.NewReader(text))

	for {
		var node yaml.Node

		err := decoder.Decode(&node)
		if errors.Is(err, io.EOF) {
			return nil
		}

		if err != nil {
			return err
		}

		document, err := yaml.Marshal(&node)
		if err != nil {
			return err
		}

		if err := r.document(&node, document); err != nil {
			return err
		}
	}
}

// document checks a document by the type that its keys indicate.
func (r *reading) document(node *yaml.Node, text []byte) error {
	var head struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string `yaml:"kind"`
	}

	keys := keysOf(node)
	if keys != nil {
		if err := node.Decode(&head); err != nil {
			return err
		}
	}

	has := func(wanted ...string) bool {
		return slices.ContainsFunc(keys, func(key string) bool { return slices.Contains(wanted, key) })
	}

	switch {
	case head.APIVersion == "v1alpha1" || has("machine", "cluster"):
		return r.machineConfig(text)
	case head.APIVersion != "" && head.Kind != "":
		return r.object(head.APIVersion+" "+head.Kind, text)
	case has("global", "transformations", "nodes", "csrApproval", "ipam", "lifecycle"):
		_, err := config.Parse("block", text)

		return err
	default:
		return foreign(keys, text)
	}
}

// keysOf returns the keys of a document, or nil if it is not a mapping.
func keysOf(node *yaml.Node) (keys []string) {
	if node.Kind == yaml.DocumentNode {
		node = node.Content[0]
	}

	if node.Kind != yaml.MappingNode {
		return nil
	}

	for i := 0; i < len(node.Content); i += 2 {
		keys = append(keys, node.Content[i].Value)
	}

	return keys
}

// machineConfig checks a machine configuration or patch as talosctl loads it, and documents for the service as talos-ccm reads them.
func (r *reading) machineConfig(text []byte) error {
	loaded, err := configloader.NewFromBytes(text, configloader.WithAllowPatchDelete())
	if err != nil {
		return err
	}

	for _, document := range loaded.Documents() {
		if service, isService := document.(*extensions.ServiceConfigV1Alpha1); isService {
			if err := r.serviceConfig(service); err != nil {
				return err
			}
		}

		validator, validates := document.(talosconfig.Validator)
		if !validates || document.Kind() == "v1alpha1" { // a patch, not complete
			continue
		}

		if _, err := validator.Validate(mode{}); err != nil {
			return fmt.Errorf("%s: %w", document.Kind(), err)
		}
	}

	return r.embedded(loaded.RawV1Alpha1())
}

// embedded checks static pods and inline manifests.
func (r *reading) embedded(patch *v1alpha1.Config) error {
	if patch == nil {
		return nil
	}

	if patch.MachineConfig != nil {
		for _, pod := range patch.MachineConfig.MachinePods {
			text, err := yaml.Marshal(pod.Object)
			if err != nil {
				return err
			}

			if err := r.object("v1 Pod", text); err != nil {
				return err
			}
		}
	}

	if patch.ClusterConfig != nil {
		for _, manifest := range patch.ClusterConfig.ClusterInlineManifests {
			if err := r.documents([]byte(manifest.InlineManifestContents)); err != nil {
				return fmt.Errorf("manifest %s: %w", manifest.InlineManifestName, err)
			}
		}
	}

	return nil
}

// mode is the validation mode of a metal machine.
type mode struct{}

func (mode) String() string        { return "metal" }
func (mode) RequiresInstall() bool { return true }
func (mode) InContainer() bool     { return false }

func (r *reading) serviceConfig(service *extensions.ServiceConfigV1Alpha1) error {
	if service.ServiceName != extension.Name {
		return nil
	}

	for _, file := range service.ServiceConfigFiles {
		if file.ConfigFileMountPath != settings.MountPath {
			return fmt.Errorf("mount path %s is not %s", file.ConfigFileMountPath, settings.MountPath)
		}

		if _, err := config.Parse("content", []byte(file.ConfigFileContent)); err != nil {
			return err
		}
	}

	return r.product.accepts(service.ServiceEnvironment)
}

// object checks an object of Kubernetes or of a known operator.
func (r *reading) object(kind string, text []byte) error {
	if known := foreignObject(kind); known != nil {
		return strictly(text, known)
	}

	text, err := sigsyaml.YAMLToJSONStrict(text)
	if err != nil {
		return err
	}

	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()

	decoded, _, err := decoder.Decode(text, nil, nil)
	if err != nil {
		return fmt.Errorf("%s: %w", kind, err)
	}

	switch o := decoded.(type) {
	case *corev1.Pod:
		return r.containers(o.Spec)
	case *appsv1.Deployment:
		return r.containers(o.Spec.Template.Spec)
	default:
		return nil
	}
}

// containers checks the arguments of containers that run talos-ccm.
func (r *reading) containers(spec corev1.PodSpec) error {
	for _, container := range spec.Containers {
		if !strings.Contains(container.Image, "/talos-ccm-pod:") {
			continue
		}

		if err := r.product.accepts(nil, container.Args...); err != nil {
			return fmt.Errorf("container %s: %w", container.Name, err)
		}
	}

	return nil
}

// strictly decodes text into a type and rejects unknown keys.
func strictly(text []byte, into any) error {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)

	return decoder.Decode(into)
}

// foreign checks a document of a program other than Kubernetes and Talos.
func foreign(keys []string, text []byte) error {
	for _, kind := range foreignDocuments() {
		if slices.Contains(keys, kind.key) {
			return strictly(text, kind.into)
		}
	}

	if keys == nil {
		return strictly(text, &[]alert{})
	}

	return fmt.Errorf("unknown document with the keys %s", strings.Join(keys, ", "))
}
