package docs

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	talosconfig "github.com/siderolabs/talos/pkg/machinery/config/config"
	"github.com/siderolabs/talos/pkg/machinery/config/configloader"
	"github.com/siderolabs/talos/pkg/machinery/config/types/k8s"
	"github.com/siderolabs/talos/pkg/machinery/config/types/v1alpha1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/syntax"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// programs are the programs that pages use.
var programs = strings.Fields("base64 cosign crane curl docker echo gh go grep helm jq kubectl make mkdir openssl sha256sum talosctl tar xargs yq")

// script checks commands.
func (c *Checker) script(at position, text string) {
	file, err := syntax.NewParser().Parse(strings.NewReader(text), "")
	if err != nil {
		c.report(at, err)

		return
	}

	syntax.Walk(file, func(node syntax.Node) bool {
		var err error

		switch n := node.(type) {
		case *syntax.CallExpr:
			err = c.command(n.Args)
		case *syntax.Redirect:
			if n.Hdoc != nil {
				err = c.documents(n.Hdoc.Lit())
			}
		}

		if err != nil {
			c.report(position{at.page, at.line + int(node.Pos().Line()) - 1}, err)
		}

		return true
	})
}

// command checks a command: the arguments of make, talos-ccm and patches, and the name of others.
func (c *Checker) command(words []*syntax.Word) error {
	// Variables and the output of other commands are empty.
	shell := &expand.Config{CmdSubst: func(io.Writer, *syntax.CmdSubst) error { return nil }}

	args, err := expand.Fields(shell, words...)
	if err != nil || len(args) == 0 {
		return err
	}

	c.Commands++

	for _, arg := range args {
		if err := c.path(arg); err != nil {
			return err
		}
	}

	switch name := path.Base(args[0]); {
	case name == "make":
		return c.make(args[1:])
	case name == "talos-ccm", strings.HasPrefix(name, "talos-ccm-linux-"):
		return c.usage(args[1:])
	case !slices.Contains(programs, name):
		return fmt.Errorf("unknown command %s", name)
	case name == "talosctl":
		if i := slices.IndexFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "{") }); i > 0 {
			return c.machineConfig(args[i])
		}
	}

	return nil
}

var subcommand = regexp.MustCompile(`^(?:[a-z]+(?: |$))*`)

// usage asks talos-ccm for the help of a command, for which it parses all flags.
func (c *Checker) usage(args []string) error {
	help, err := exec.Command(c.Binary, append(args, "--help")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("talos-ccm %q: %s", args, help)
	}

	if name := subcommand.FindString(strings.Join(args, " ")); !strings.Contains(string(help), strings.TrimSpace("talos-ccm "+name)) {
		return fmt.Errorf("unknown command talos-ccm %s", name)
	}

	return nil
}

// inputFile matches words of commands that name a file for input.
var inputFile = regexp.MustCompile(`[ =@]([\w./-]+\.ya?ml)\b`)

// inputs checks that input files of commands exist in the repository, or are created by make or by the page: by a block
// with the name in its first line, by an ExtensionServiceConfig, or as output of a command. Files for tar may be missing.
func (c *Checker) inputs(at position, text string) {
	for line := range strings.Lines(text) {
		for _, match := range inputFile.FindAllStringSubmatch(line, -1) {
			name := match[1]
			if _, err := os.Stat(filepath.Join(c.Root, name)); err == nil || strings.HasPrefix(name, "_out/") || strings.HasPrefix(line, "tar ") {
				continue
			}

			created := regexp.MustCompile(`(?:\n *# |mountPath: .*/|> |(?:-o|--output) )` + regexp.QuoteMeta(name) + `\b`)
			if name == "controlplane.yaml" || name == "worker.yaml" {
				created = regexp.MustCompile(`\ntalosctl gen config `)
			}

			if !created.Match(c.source) {
				c.report(at, fmt.Errorf("file %s exists neither in the repository nor on the page (a block whose first line is # %[1]s creates it)", name))
			}
		}

		at.line++
	}
}

// make checks that the Makefile has the targets and uses the variables in args.
func (c *Checker) make(args []string) error {
	makefile, err := os.ReadFile(filepath.Join(c.Root, "Makefile"))

	for _, arg := range args {
		name, _, assigns := strings.Cut(arg, "=")

		switch {
		case assigns && !regexp.MustCompile(`\$\(`+name+`[:)]`).Match(makefile):
			return fmt.Errorf("the Makefile does not use a variable %s", name)
		case !assigns && !strings.Contains(string(makefile), "\n"+name+":"):
			return fmt.Errorf("the Makefile has no target %s", name)
		}
	}

	return err
}

// foreign has keys of documents that talos-ccm, Kubernetes and Talos do not read: Prometheus's configuration, which
// test/monitoring loads, schematics, profiles for imager, and Image Factory's configuration, which test/imager loads.
var foreign = []string{"scrape_configs", "customization", "input", "artifacts"}

// documents checks a stream of documents by the types that their keys indicate. By default, a document is a configuration
// file of talos-ccm.
func (c *Checker) documents(text string) (err error) {
	for document := range strings.SplitSeq(text, "\n---\n") {
		var keys map[string]any
		if err := yaml.UnmarshalStrict([]byte(document), &keys); err != nil {
			return err
		}

		switch {
		case strings.HasPrefix(document, "# values.yaml\n"): // of the chart, which test/chart renders
		case keys["apiVersion"] == "v1alpha1", keys["machine"] != nil, keys["cluster"] != nil:
			err = errors.Join(err, c.machineConfig(document))
		case keys["apiVersion"] != nil:
			err = errors.Join(err, c.object([]byte(document)))
		case !slices.ContainsFunc(foreign, func(key string) bool { return keys[key] != nil }):
			_, invalid := config.Parse("block", []byte(document))
			err = errors.Join(err, invalid)
		}
	}

	return err
}

// machineConfig checks a machine configuration or patch as talosctl loads it, with documents for the service and static
// pods as talos-ccm and Kubernetes read them.
func (c *Checker) machineConfig(text string) error {
	loaded, err := configloader.NewFromBytes([]byte(text), configloader.WithAllowPatchDelete())
	if err != nil {
		return err
	}

	for _, document := range loaded.Documents() {
		switch document := document.(type) {
		case *v1alpha1.Config, *k8s.KubeletConfigV1Alpha1, *k8s.KubeControllerManagerConfigV1Alpha1, *k8s.KubeProxyConfigV1Alpha1:
			// Patches are not complete.
		case talosconfig.Validator:
			_, invalid := document.Validate(nil) // such documents do not depend on the mode
			err = errors.Join(err, invalid)
		}
	}

	for _, service := range loaded.ExtensionServiceConfigs() {
		if service.Name() == extension.Name {
			err = errors.Join(err, c.service(service))
		}
	}

	for _, pod := range loaded.K8sStaticPodConfigs() {
		object, invalid := json.Marshal(pod.Pod())
		err = errors.Join(err, invalid, c.object(object))
	}

	return err
}

func (c *Checker) service(service talosconfig.ExtensionServiceConfig) error {
	err := c.accepts(service.Environment())

	for _, file := range service.ConfigFiles() {
		if file.MountPath() != settings.MountPath {
			err = errors.Join(err, fmt.Errorf("mount path %s is not %s", file.MountPath(), settings.MountPath))
		}

		_, invalid := config.Parse("content", []byte(file.Content()))
		err = errors.Join(err, invalid)
	}

	return err
}

// object checks an object of Kubernetes, and the arguments of a pod that runs talos-ccm.
func (c *Checker) object(text []byte) error {
	decoded, _, err := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer().Decode(text, nil, nil)

	if pod, isPod := decoded.(*corev1.Pod); isPod {
		for _, container := range pod.Spec.Containers {
			if strings.Contains(container.Image, "/talos-ccm-pod:") {
				err = errors.Join(err, c.accepts(nil, container.Args...))
			}
		}
	}

	return err
}
