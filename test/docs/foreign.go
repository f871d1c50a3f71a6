package docs

// The types below are the parts of other programs' formats that the documentation uses. Look up and add missing keys.

// metadata is the metadata of an object.
type metadata struct {
	Name        string            `yaml:"name"`
	Namespace   string            `yaml:"namespace"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

// talosAccount is a ServiceAccount of talos.dev/v1alpha1: docs.siderolabs.com, "Talos API access from Kubernetes".
type talosAccount struct {
	APIVersion string   `yaml:"apiVersion"`
	Kind       string   `yaml:"kind"`
	Metadata   metadata `yaml:"metadata"`
	Spec       struct {
		Roles []string `yaml:"roles"`
	} `yaml:"spec"`
}

// matchLabels is a label selector.
type matchLabels struct {
	MatchLabels map[string]string `yaml:"matchLabels"`
}

// tlsConfig is Prometheus's; the operator uses the same fields in camel case.
type tlsConfig struct {
	CAFile             string `yaml:"ca_file"`
	ServerName         string `yaml:"server_name"`
	InsecureSkipVerify bool   `yaml:"insecure_skip_verify"`
}

// relabeling is Prometheus's relabel_config.
type relabeling struct {
	SourceLabels []string `yaml:"source_labels"`
	TargetLabel  string   `yaml:"target_label"`
	Regex        string   `yaml:"regex"`
	Replacement  string   `yaml:"replacement"`
	Action       string   `yaml:"action"`
}

// scraping is a part of Prometheus's configuration: prometheus.io, "Configuration".
type scraping struct {
	ScrapeConfigs []struct {
		JobName       string `yaml:"job_name"`
		Scheme        string `yaml:"scheme"`
		Authorization struct {
			CredentialsFile string `yaml:"credentials_file"`
		} `yaml:"authorization"`
		TLSConfig           tlsConfig `yaml:"tls_config"`
		KubernetesDiscovery []struct {
			Role      string `yaml:"role"`
			Selectors []struct {
				Role  string `yaml:"role"`
				Label string `yaml:"label"`
			} `yaml:"selectors"`
		} `yaml:"kubernetes_sd_configs"`
		StaticConfigs []struct {
			Targets []string `yaml:"targets"`
		} `yaml:"static_configs"`
		RelabelConfigs []relabeling `yaml:"relabel_configs"`
	} `yaml:"scrape_configs"`
}

// serviceMonitor is a ServiceMonitor of monitoring.coreos.com/v1: prometheus-operator.dev, "API reference".
type serviceMonitor struct {
	APIVersion string   `yaml:"apiVersion"`
	Kind       string   `yaml:"kind"`
	Metadata   metadata `yaml:"metadata"`
	Spec       struct {
		Selector          matchLabels `yaml:"selector"`
		NamespaceSelector struct {
			MatchNames []string `yaml:"matchNames"`
		} `yaml:"namespaceSelector"`
		Endpoints []struct {
			Port          string `yaml:"port"`
			Scheme        string `yaml:"scheme"`
			Interval      string `yaml:"interval"`
			Authorization struct {
				Credentials struct {
					Name string `yaml:"name"`
					Key  string `yaml:"key"`
				} `yaml:"credentials"`
			} `yaml:"authorization"`
			BearerTokenFile string `yaml:"bearerTokenFile"`
			TLSConfig       struct {
				CAFile             string `yaml:"caFile"`
				ServerName         string `yaml:"serverName"`
				InsecureSkipVerify bool   `yaml:"insecureSkipVerify"`
			} `yaml:"tlsConfig"`
		} `yaml:"endpoints"`
	} `yaml:"spec"`
}

// alert is a rule of Prometheus.
type alert struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

// schematic is Image Factory's: siderolabs/image-factory, pkg/schematic.
type schematic struct {
	Overlay struct {
		Image string `yaml:"image"`
		Name  string `yaml:"name"`
	} `yaml:"overlay"`
	Customization struct {
		ExtraKernelArgs  []string `yaml:"extraKernelArgs"`
		SystemExtensions struct {
			OfficialExtensions []string `yaml:"officialExtensions"`
		} `yaml:"systemExtensions"`
	} `yaml:"customization"`
}

// asset is a file or an image for imager.
type asset struct {
	Path        string `yaml:"path"`
	ImageRef    string `yaml:"imageRef"`
	TarballPath string `yaml:"tarballPath"`
	OCIPath     string `yaml:"ociPath"`
}

// profile is imager's: siderolabs/talos, pkg/imager/profile.
type profile struct {
	Arch       string `yaml:"arch"`
	Platform   string `yaml:"platform"`
	SecureBoot bool   `yaml:"secureboot"`
	Version    string `yaml:"version"`
	Input      struct {
		Kernel           asset   `yaml:"kernel"`
		Initramfs        asset   `yaml:"initramfs"`
		BaseInstaller    asset   `yaml:"baseInstaller"`
		SystemExtensions []asset `yaml:"systemExtensions"`
	} `yaml:"input"`
	Output struct {
		Kind      string `yaml:"kind"`
		OutFormat string `yaml:"outFormat"`
	} `yaml:"output"`
}

// chartValues has the values of the Helm chart in packaging/chart that the documentation sets.
type chartValues struct {
	Image             string             `yaml:"image"`
	Replicas          int                `yaml:"replicas"`
	Args              []string           `yaml:"args"`
	Config            map[string]any     `yaml:"config"`
	TalosconfigSecret string             `yaml:"talosconfigSecret"`
	NodeSelector      map[string]*string `yaml:"nodeSelector"`
	APIServer         struct {
		Host string `yaml:"host"`
		Port int    `yaml:"port"`
	} `yaml:"apiServer"`
}

// foreignObject returns the type of an object that client-go does not have, or nil if the kind is unknown.
func foreignObject(kind string) any {
	switch kind {
	case "talos.dev/v1alpha1 ServiceAccount":
		return new(talosAccount)
	case "monitoring.coreos.com/v1 ServiceMonitor":
		return new(serviceMonitor)
	default:
		return nil
	}
}

type foreignDocument struct {
	key  string
	into any
}

// foreignDocuments returns the types of documents without apiVersion, each with a key that identifies it.
func foreignDocuments() []foreignDocument {
	return []foreignDocument{
		{key: "image", into: new(chartValues)},
		{key: "input", into: new(profile)},
		{key: "customization", into: new(schematic)},
		{key: "scrape_configs", into: new(scraping)},
	}
}
